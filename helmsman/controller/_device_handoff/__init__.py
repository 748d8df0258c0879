"""Devices that a trainer and a rollout share, one after the other."""
