"""The processes of a job: serve.py runs the roles of a group as a server, local.py starts such processes on
this machine, launch.py does what `rolemesh run` does: it starts them and trains."""
