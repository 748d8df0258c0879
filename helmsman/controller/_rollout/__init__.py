"""Rollouts: the request queue, the pool of instances, their weights; episodes and rewards."""
