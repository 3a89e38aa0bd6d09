"""The client side of a call.

clients.py    clients of the roles, used by a controller
dispatch.py   spreads a call over the replicas of a pool
pool.py       selects replicas, and tracks which are alive and busy
pending.py    counts rows that wait for an answer
call.py       makes one call to one replica (replica.py)
discovery.py  follows the addresses of replicas
"""
