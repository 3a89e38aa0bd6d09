"""A role whose model is spread over several processes, its ranks (docs/ranks.md)."""
