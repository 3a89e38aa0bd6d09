"""A run: loop.py makes step after step, and the rest is what lies between them."""
