"""Training a model: the loop over mini-batches, the optimizer, and checkpoints."""
