"""Transfers weights by version: a holder publishes a manifest; receivers pull ranges, verify, and then swap."""
