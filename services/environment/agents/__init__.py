"""Agents: they answer the policy's turns. rolemesh/catalog/agents.py declares them."""
