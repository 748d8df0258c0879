"""Calls from the driver to its workers: connections, pending calls, fan-out, health checks."""
