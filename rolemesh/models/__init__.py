"""Models: loading Hugging Face directories, heads, forward passes, optimizer, checkpoints."""
