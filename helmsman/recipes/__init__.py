"""Ready-made training loops, built on the public API only."""
