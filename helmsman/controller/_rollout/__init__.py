"""The rollout controller: requests, instances, weights."""
