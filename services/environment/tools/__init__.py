"""Tools. rolemesh/catalog/tools.py declares them; loading.py makes those that a job names."""
