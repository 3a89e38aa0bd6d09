"""The processes of a job.

serve.py           runs the roles of a group as a server; serve_ranks.py starts all ranks of a group
role_processes.py  starts, watches and ends such processes; environments.py has their environment variables
launchers.py       starts ranks on this machine; ray_cluster.py and ray_rank.py by Ray
fork_server.py     forks processes from one that has imported their code; role_forks.py starts it for roles
launch.py          `rolemesh run`: starts all roles and trains
single_role.py     starts one role, for evaluate.py and generate.py
shutdown.py        ends a process that serves
"""
