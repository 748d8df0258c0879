"""Training and rollout engines on torch and transformers.

They import only the contracts; an engine is named by its import path.
"""
