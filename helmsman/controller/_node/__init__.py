"""Facts about this machine: devices, environment, launchers, health checks, records of runs."""
