"""The processes of a job.

serve.py runs the roles of a group as a server. role_processes.py starts such processes, on this machine by
launchers.py, or ranks by Ray (ray_cluster.py, ray_rank.py).
launch.py is `rolemesh run`: it starts them and trains.
"""
