"""A log of refused connections that hostile peers cannot flood."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable


class RefusalLog:
    """Reports refused connections in bounded space.

    The first one is reported at once. Later ones are counted, and reported by one line at the end
    of each interval.

    Args:
        report: Writes a line.
        interval_s: Interval in seconds.
    """

    def __init__(self, report: Callable[[str], None], interval_s: float = 60.0) -> None:
        self._report = report
        self._interval_s = interval_s
        self._counts: collections.Counter[str] = collections.Counter()
        self._latest = ""
        self._timer: asyncio.TimerHandle | None = None

    def note(self, what: str, host: str) -> None:
        """Count a refused connection.

        Args:
            what: Predicate of a sentence whose subject is a process on ``host``.
            host: Address of the process.
        """
        if self._timer is None:
            self._report(f"a process on {host} {what}")
            self._timer = asyncio.get_running_loop().call_later(
                self._interval_s, self._end_interval
            )
        else:
            self._counts[what] += 1
            self._latest = host

    def _end_interval(self) -> None:
        self._timer = None
        if self._counts:
            self._flush()
            self._timer = asyncio.get_running_loop().call_later(
                self._interval_s, self._end_interval
            )

    def _flush(self) -> None:
        kinds = "; ".join(f"{count} x '{what}'" for what, count in self._counts.most_common())
        self._report(
            f"{self._counts.total()} more connections were refused in {self._interval_s:g} s at "
            "most, the latest from "
            f"{self._latest}: {kinds}"
        )
        self._counts.clear()

    def close(self) -> None:
        """Report the refusals that were counted. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._counts:
            self._flush()
