"""`rolemesh generate` and `rolemesh evaluate`: one role each, and no training."""
