"""Checks before anything starts: of a job against the memory that there is, and of values of the chart."""
