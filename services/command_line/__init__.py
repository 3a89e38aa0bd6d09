"""The command line. app.py and run_commands.py define the commands; the other files implement them.

plan_command.py compares placements, demo.py makes the demo's model and data, controller_client.py queries and
controls a running controller, kubectl.py does so inside a cluster.
"""
