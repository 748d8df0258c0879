"""What examples/grpo_hf.py is made of, and its configurations."""
