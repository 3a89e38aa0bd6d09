"""Models: loading and saving Hugging Face directories, heads, adapters, forward passes, micro-batches."""
