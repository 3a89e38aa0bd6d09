"""What people see of a run: progress, tables, curves, and the loggers they chose."""
