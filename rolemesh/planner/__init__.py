"""The placement planner: estimates a job's memory and time before anything starts (`docs/planner.md`).

shapes.py  reads a model directory; device_specs.py describes the hardware
memory.py  bytes on a device, with activations.py; host_memory.py has bytes of host memory
cost.py    seconds of a step; collectives.py has those of collectives among ranks
estimate.py  groups of roles on devices; search.py compares groupings, compare.py strategies

Nothing here loads a model. torch is imported only if a directory has no weights to count.
"""
