"""Weights by version: a holder publishes a manifest, receivers pull ranges, verify, and swap when whole."""
