"""The server's end of a call.

server.py     binds, loads, serves, drains; access.py says who may call what
guard.py      surrounds every call; requests.py reads what a call brings
bounded.py    bounds one message; handlers.py is what bounded.py and access.py put around a method
"""
