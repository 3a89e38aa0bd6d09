"""How a worker's methods run: in this process on one thread (local.py), by turns where roles share a device
(lease.py), their tensors off it meanwhile (parking.py)."""
