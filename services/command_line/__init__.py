"""`rolemesh …`: app.py and run_commands.py have the commands, the other files what these do.

plan.py compares placements, demo.py makes the demo's model and data, controller_client.py asks and steers a
running controller, kubectl.py does so inside a cluster.
"""
