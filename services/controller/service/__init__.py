"""ControllerService: reports the run's state, and accepts commands to pause, resume and stop."""
