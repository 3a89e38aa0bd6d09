"""How a worker's methods run: in this process on one thread (local.py). Roles that share a device take turns
(lease.py) and move their tensors off it in between (offloading.py)."""
