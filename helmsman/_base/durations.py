"""Durations: the recent durations of an operation, and their median."""

from __future__ import annotations

import collections
import statistics

_REMEMBERED = 32


class Durations:
    """Recent durations of an operation. Thread-safe, since each step is one of the interpreter."""

    __slots__ = ("_recent", "count")

    def __init__(self) -> None:
        self._recent: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self.count = 0
        """Number of all durations so far."""

    def add(self, seconds: float) -> None:
        """Add a duration in seconds."""
        self._recent.append(seconds)
        self.count += 1

    @property
    def median_s(self) -> float | None:
        """Median of the last ones in seconds; None without any."""
        recent = list(self._recent)
        return statistics.median(recent) if recent else None
