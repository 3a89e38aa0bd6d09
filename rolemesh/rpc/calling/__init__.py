"""The client side of a call.

clients.py    clients of the roles, used by a controller; episodes.py has the environment's
dispatch.py   spreads a call over the replicas of a pool
pool.py       selects replicas, and tracks which are alive and busy
pending.py    counts rows that wait for an answer
affinity.py   remembers which replica answered a row last
call.py       makes one call to one replica (replica.py); deadlines.py has its deadline
discovery.py  follows the addresses of replicas
reminder.py   logs which replicas are waited for
"""
