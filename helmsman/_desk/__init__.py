"""The operator's desk: observes a run, and explains it to `helmsman status`, `why` and others."""
