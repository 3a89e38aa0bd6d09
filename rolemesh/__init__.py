"""Rolemesh, the library: what every role shares. Start with roles.py. Nothing here imports services/."""

__version__ = "0.1.0"
