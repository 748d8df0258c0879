"""The worker as an operating-system process: guardian, ports, environment, pulse, files."""
