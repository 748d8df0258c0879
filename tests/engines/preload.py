"""What workers with real engines import. A process that is forked with it is ready in a tenth of
the time.
"""

PRELOAD = ("torch", "helmsman.engines.train", "helmsman.engines.rollout")
