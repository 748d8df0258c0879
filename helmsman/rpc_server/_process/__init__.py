"""The worker as an operating-system process: end with the driver, ports, heartbeats, files."""
