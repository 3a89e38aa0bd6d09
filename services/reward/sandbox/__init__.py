"""Programs that nobody has read, run so that they can harm nothing.

box.py is the outside: it starts inside.py in a bare interpreter of its own, which shuts itself in (landlock.py)
and then forks once for each program; what forks shuts itself in further (seccomp.py, limits) before it runs a
line. docs/rewards.md says which layer guarantees what.
"""
