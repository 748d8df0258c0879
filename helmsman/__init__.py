"""Helmsman: the single-controller scheduler for LLM post-training."""
