"""Interactions: what answers a turn without a call. loading.py makes those that a job names."""
