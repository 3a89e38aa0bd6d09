"""Typed values of the chart rlhf-job, and the generator of the chart's files."""
