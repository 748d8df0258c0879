"""The modules that workers with real engines import; forked with them, a process starts ten times
as fast.
"""

PRELOAD = ("torch", "helmsman.engines.train", "helmsman.engines.rollout")
