"""Tools. rolemesh/catalog/tools.py declares them, and loading.py makes those that a job names."""
