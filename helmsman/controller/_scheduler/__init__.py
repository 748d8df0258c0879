"""The scheduler: roles, starts, calls and values, on the backends inline, local and ray."""
