"""An event loop whose clock jumps: what waits for a time gets there at once, so hours of waiting pass in seconds.

The code that runs on it is the code that runs in earnest: it reads the loop's time and sleeps by ``asyncio.sleep``.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for a timer, lets the clock jump to it; but first comes what is there already."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)  # nothing is due ever: a thread or a socket will have to wake us
        if not (ready := super().select(0)):
            # By the least step more: after some months asyncio's own tolerance is lost in rounding, and it would wait for ever
            # for the clock to pass what is due at this very moment.
            self.now = math.nextafter(self.now + timeout, math.inf)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock, which begins at 0."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._clock.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
