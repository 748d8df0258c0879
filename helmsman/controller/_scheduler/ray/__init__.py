"""The Ray backend: placement groups, actors, embedded clusters."""
