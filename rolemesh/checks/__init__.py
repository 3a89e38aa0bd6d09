"""Checks of a job against the memory of its devices and containers, before anything starts."""
