"""Hugging Face models and their files: loading, heads, checkpoints, export."""
