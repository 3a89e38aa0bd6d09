"""The deployables: one folder for each role's service, one for the controller, and the command line.

serve.py runs the roles of a group as a server, processes.py starts role processes on this machine, control.py
makes a run with roles that are served somewhere, launch.py does both. plan.py compares placements, steering.py,
watch.py and kubectl.py follow a run and steer it, demo.py makes the demo's model and data.

A service imports the library `rolemesh` and never another service.
"""
