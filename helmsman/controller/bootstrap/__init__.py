"""Bringing a Ray cluster up on the nodes of a job, running the script on it, and taking it down again."""
