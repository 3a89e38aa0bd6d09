"""The wire beside others, and under hostile senders."""
