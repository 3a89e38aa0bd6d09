"""The planner's estimates beside measurements."""
