"""The deployables, installed as `rolemesh.services`: a folder for each role and one for the controller.

processes/ starts a role's server and, on one machine, all of a job's; command_line/ is `rolemesh …`.
A service imports the library `rolemesh` and never another service.
"""
