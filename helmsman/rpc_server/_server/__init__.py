"""Servers that expose an engine host: authenticated sockets, the Ray actor, the forkserver."""
