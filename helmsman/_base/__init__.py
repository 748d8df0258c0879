"""Shared by script and workers: event loops, threads, durations."""
