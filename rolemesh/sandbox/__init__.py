"""Runs untrusted programs in a sandbox. The roles reward and environment use it.

box.py is the outside. It starts inside.py in a bare interpreter of its own, which restricts its own rights
(landlock.py) and then forks for each program. The fork restricts itself further (seccomp.py, limits) before it
runs the program. interpreter.py and interpreter_inside.py do the same for an interpreter that keeps its
variables between calls. rolemesh/process_group.py ends processes with the process that started them.
docs/reward-guarantees.md says what each layer guarantees.
"""
