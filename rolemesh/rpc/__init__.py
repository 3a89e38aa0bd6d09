"""Calls between the roles: one server and one client for all of them.

contract.py   what the .proto says about a method, read from the descriptors
serving/      the server's end: it binds, guards every call, drains
calling/      the client's end: it finds replicas, spreads a call over them, reads the answers
batches.py    holds the batches of a call against their method's declaration, at either end
answers.py    reads an answer that is one message
channels.py   every channel that is made; tls.py has the keys of both ends
metadata.py   the keys of a call's metadata
errors.py     the one table from error to gRPC status and back
"""
