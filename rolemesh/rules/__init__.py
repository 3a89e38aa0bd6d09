"""Rules that several services use: whether a text has the right answer."""
