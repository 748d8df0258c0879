"""The order of a group's calls: behind the check of the ranks' coordinates, and at most so many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from helmsman.api.errors import CallTimeoutError


class CallOrder:
    """Lets the calls of a group pass in the order in which they were made. It is used on Helmsman's event loop.

    Args:
        name: of the group.
        max_concurrency: calls that may run at a time; None for no limit.
        check: compares the ranks' coordinates within a limit in seconds, before the first call that is cut along an axis.
    """

    def __init__(self, name: str, max_concurrency: int | None, check: Callable[[float], Awaitable[None]]) -> None:
        self.is_checked = False
        """Whether the coordinates have been compared."""
        self._name = name
        self._check = check
        self._lock = asyncio.Lock()
        """Held while the coordinates are compared, so that later calls wait behind the call that does so."""
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def enter(self, method: str, limit_s: float | None, deadline: float, *, is_cut: bool) -> float | None:
        """Wait for earlier calls whose check of the coordinates is pending, and check them for the first call that is cut.

        The lock serves waiting calls in their order, and nothing is awaited between its release and the sending of a call, so
        calls reach the workers in the order in which they were made.

        Args:
            limit_s: the call's timeout argument.
            deadline: end of the call by time.monotonic().
        Returns: seconds that the call itself may take.
        Raises: CallTimeoutError at the deadline; the errors of the check.
        """
        waits = self._lock.locked() or (is_cut and not self.is_checked)
        began = time.monotonic()
        try:
            async with asyncio.timeout(deadline - began):
                await self._lock.acquire()
        except TimeoutError as error:
            raise CallTimeoutError(
                worker_id=f"{self._name}/0",
                engine_name=None,
                method=method,
                elapsed_s=time.monotonic() - began,
                limit_s=deadline - began,
                limit_source="Timeouts.call_s" if limit_s is None else "the call's timeout argument",
                worker_alive=True,
                state="the call was not sent, since an earlier call still waits for the coordinates of the ranks",
                stack="",
            ) from error
        try:
            if is_cut and not self.is_checked:
                await self._check(max(0.0, deadline - time.monotonic()))
                self.is_checked = True
        finally:
            self._lock.release()
        return max(0.0, deadline - time.monotonic()) if waits else limit_s

    @contextlib.asynccontextmanager
    async def slot(self, limit_s: float | None, deadline: float) -> AsyncIterator[float | None]:
        """Wait until the call may run; gives the seconds that it may take."""
        if self._slots is None:
            yield limit_s
            return
        async with self._slots:
            yield max(0.0, deadline - time.monotonic())
