"""Roles over gRPC: one codec, one server, one client for all of them.

contract.py   what the .proto says about a method, read from the descriptors
codec.py      DataProto to bytes and back; streams.py and carrier.py carry them
server.py     binds, loads, serves, drains; access.py says who may call what
guard.py      what surrounds every call; requests.py and batches.py read what a call brings
room.py       memory for batches, shared by all streams; bounded.py and limits.py bound one message
handlers.py   what bounded.py and access.py put around a method; answers.py reads an answer of one message
channels.py   every channel that is made; tls.py has the keys of both ends
clients.py    the roles as a controller sees them; dispatch.py spreads a call over the replicas in pool.py
errors.py     the one table from error to gRPC status and back
"""
