"""How a worker's methods run: in this process on one thread (local.py)."""
