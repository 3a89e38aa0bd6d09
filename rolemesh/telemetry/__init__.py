"""Logs, Prometheus metrics and timelines of a process, and the context that labels them."""
