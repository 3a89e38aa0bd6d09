"""Agents: who answers a conversation. rolemesh/catalog/agents.py declares them."""
