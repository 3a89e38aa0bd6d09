"""The controller: the algorithm and no GPU.

pages/        one step, from prompts to new weights, as a reader would write it on a board: ppo.py, grpo.py, …
stages/       the parts that the controller itself computes: fan-out, advantages, corrections, validation
run/          the loop around the steps: checkpoints, generation ahead, stopwatch, run directory
display/      progress, tables, curves, loggers
service/      the controller's own gRPC service: status and steering
preparing.py  `rolemesh prepare`: what comes before it in its pod
main.py       `rolemesh control`: a run with roles that are served somewhere
"""
