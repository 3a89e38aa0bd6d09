"""The placement planner: estimates a job's memory and time before anything starts (`docs/planner.md`).

shapes reads a model directory, memory and cost have the formulas, devices describes the hardware, plan places
groups of roles on devices, and search compares groupings. Nothing here loads a model. torch is imported only if
a directory has no weights to count.
"""
