"""Weight transfer from a trainer to a rollout, and devices that both share."""
