"""What `rolemesh generate` and `rolemesh evaluate` do, each with one role and without training."""
