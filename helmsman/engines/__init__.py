"""Train and rollout engines on torch and transformers. They import only the contracts; an engine
travels by its import path.
"""
