"""Commands that look into a run from another process: status, logs, stacks and why."""
