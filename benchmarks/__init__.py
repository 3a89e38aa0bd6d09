"""What is fast, measured against peers in one run: ratios, not absolute numbers."""
