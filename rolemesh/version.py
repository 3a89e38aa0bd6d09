"""The version of Rolemesh. pyproject.toml and the Makefile read it here."""

__version__ = "0.1.0"
