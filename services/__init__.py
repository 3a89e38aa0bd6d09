"""The deployables: one folder for each role's service, one for the controller, and the command line.

A service imports the library `rolemesh` and never another service.
"""
