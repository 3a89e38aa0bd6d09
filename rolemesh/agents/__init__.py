"""Conversations of many turns: environments, how calls of tools are written, and how ids are appended."""
