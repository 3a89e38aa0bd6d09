"""Models: loading any Hugging Face directory, heads, forward passes, optimizer, checkpoints."""
