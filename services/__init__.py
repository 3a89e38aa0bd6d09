"""The deployables: one folder for each role's service, one for the controller, and the command line.

serve.py runs one role as a server, processes.py starts role processes on this machine, control.py makes a run
with roles that are served somewhere, launch.py does both, demo.py makes the demo's model and data.

A service imports the library `rolemesh` and never another service.
"""
