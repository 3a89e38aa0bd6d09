"""The server side of a call.

server.py     binds, loads, serves, drains; access.py enforces who may call which method
guard.py      wraps every call of our services; requests.py reads its metadata and message
bounded.py    limits the size of a message; handlers.py wraps methods for bounded.py and access.py
"""
