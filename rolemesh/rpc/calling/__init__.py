"""The client's end of a call.

clients.py    the roles as a controller sees them
dispatch.py   spreads a call over the replicas in pool.py; call.py is one call to one replica.py
discovery.py  follows their addresses
"""
