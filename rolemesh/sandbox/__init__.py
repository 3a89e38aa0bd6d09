"""Runs untrusted programs in a sandbox. The roles reward and environment use it.

box.py is the outside. It starts inside.py in a bare interpreter of its own, which restricts its own rights
(landlock.py) and then forks for each program. The fork restricts itself further (seccomp.py, limits) before it
runs the program. session.py and session_inside.py do the same for an interpreter that keeps its variables
between calls. parent.py ends processes with the process that started them, also outside of a sandbox.
docs/rewards.md says what each layer guarantees.
"""
