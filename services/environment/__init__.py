"""The environment role: the other side of conversations.

worker.py keeps the episodes of a replica, and episode.py is one of them. agents/ has who answers, tools/ and
interactions/ what tool_agent answers with, external/ what programs call.
"""
