"""The parts that a job can name: estimators, policy losses, pages, engines, reward managers, data sets, agents,
tools, call formats and roles.

Each kind has one file and one `Catalog`, a table from name to declaration. Configuration, planner, step graph,
chart and docs read the declaration and compare no names. A declaration names its code by import path, as an
entry point does, so reading a job imports neither torch nor an engine. Plug-ins (rolemesh/plugins.py) add to
the same tables.
"""
