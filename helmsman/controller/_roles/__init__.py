"""Base of the controllers of one role: calls to all its workers, environment of its ranks."""
