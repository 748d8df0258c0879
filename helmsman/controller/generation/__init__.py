"""Requests between their submission and their one end: queued, routed, followed, aborted, tried again."""
