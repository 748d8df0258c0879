"""Weight transfer from a trainer to a rollout (helmsman.api.weight_exchange)."""
