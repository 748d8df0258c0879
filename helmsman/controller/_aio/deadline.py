"""One deadline for a whole operation, on the monotonic clock."""

from __future__ import annotations

import time


class Deadline:
    """A point in time that all steps of an operation share."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the operation began."""
        return time.monotonic() - self._start

    @property
    def remaining_s(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self.limit_s - self.elapsed_s)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining_s == 0.0
