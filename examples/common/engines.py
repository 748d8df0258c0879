"""What the examples' workers run."""

ENGINE_MODULES = ("torch", "helmsman.engines.train", "helmsman.engines.rollout")
"""Workers that are forked from a process which has imported these start in a tenth of the time."""
