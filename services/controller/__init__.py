"""The controller: the algorithm and no GPU.

pages/           one step, from prompts to new weights, as one would write it on a board: ppo.py, grpo.py, …
stages/          the parts that the controller itself computes: fan-out, advantages, corrections, validation
run/             the loop around the steps: checkpoints, generation ahead, stopwatch, run directory
conversations/   rows of several turns, between the rollout and the environment
offline/         `rolemesh generate` and `rolemesh evaluate`
display/         progress, tables, curves, loggers
service/         the controller's own gRPC service: status and steering
preparing.py     `rolemesh prepare`: a command that runs before a pod's process
prepare_lock.py  one pod at a time does so
start_guard.py   counts the starts that end before the run begins
scale_down.py    scales the roles' pods to zero after a run, and up before one
main.py          `rolemesh control`: a run with roles that are already served
"""
