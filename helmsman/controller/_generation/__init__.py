"""Scheduler of generation requests, and supervision of the instances that serve them."""
