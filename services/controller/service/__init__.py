"""ControllerService: answers who asks what the run is doing, and takes orders to pause and stop."""
