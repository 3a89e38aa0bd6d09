"""Tools. rolemesh/catalog/tools.py declares them, and tool_set.py makes those that a job names."""
