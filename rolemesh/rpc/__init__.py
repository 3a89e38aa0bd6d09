"""Calls between the roles: one server and one client for all of them.

contract.py       reads the properties of each method from the .proto's descriptors
serving/          the server side: binds, guards every call, drains
calling/          the client side: finds replicas, distributes a call over them, reads the answers
batches.py        checks the batches of a call against their method's declaration, on both sides
unary_answers.py  reads an answer that is one message
channels.py       opens every channel; tls.py manages the keys of both sides
metadata.py       the keys of a call's metadata; term.py reads and writes one of them, the controller's term
status_codes.py   the one table from error to gRPC status and back
"""
