"""Controllers of one role: calls on all its workers and environment of its ranks."""
