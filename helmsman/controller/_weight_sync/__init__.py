"""Weight transfer from a trainer to a rollout, through the source and the sink of
helmsman.api.weight_exchange.
"""
