"""The server side of a call.

server.py         binds, serves, drains; access.py enforces who may call which method
guard.py          wraps every call of our services; requests.py reads its metadata and message
bounded.py        limits the size of a message; handlers.py wraps methods for bounded.py and access.py
servicers.py      the generated base classes of servicers
memory_budget.py  memory for batches, shared by all streams of a process
trained.py        the base of servicers of trained roles; terms.py lets one controller at a time call them
"""
