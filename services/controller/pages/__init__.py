"""The pages, each one step of an algorithm. choice.py selects a job's page; step.py has a page's arguments."""
