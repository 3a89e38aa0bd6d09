"""Interactions: they answer the policy's turns without a call, as users. loading.py makes a job's."""
