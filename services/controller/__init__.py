"""The controller: the algorithm and no GPU.

A page (ppo.py, grpo.py, remax.py, dapo.py) is one step, from prompts to new weights, as a reader would write it
on a board; it takes `Roles` and cannot tell whether they are workers in this process or clients of services.
loop.py makes the steps, and what lies between them is beside it: checkpoints, validation, loggers, curves,
progress. servicer.py answers who asks what the run is doing.
"""
