"""Output of a run for people: progress, tables, curves, and the configured loggers."""
