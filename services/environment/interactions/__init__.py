"""Interactions: they answer the policy's turns without a call, as users. interaction_set.py makes a job's."""
