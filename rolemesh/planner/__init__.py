"""The placement planner: what a job takes in memory and time before anything starts. `docs/planner.md`.

shapes reads a model directory, memory and cost are formulas, devices knows the hardware, plan puts groups of
roles on devices, search looks through the groupings. Nothing here loads a model, and torch is imported only
where a directory holds no weights to count.
"""
