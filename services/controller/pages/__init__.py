"""The pages, each one step of an algorithm. choice.py tells which one a job takes, step.py what it is given."""
