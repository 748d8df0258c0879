"""Shared parts of rollout engines: admission of requests, and weight updates during generation."""
