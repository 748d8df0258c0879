"""Looks up how a worker ended, once for all the calls that were in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from helmsman.controller._transport.base import Ending

log = logging.getLogger(__name__)

_LIMIT_S = 1.8
"""Seconds that the error of a call waits for the cause."""


class Investigation:
    """A look-up of how a worker ended, begun on the running event loop.

    Args:
        worker_id: for the log.
        look_up: returns how it ended; it may take longer than the calls wait.
    """

    def __init__(self, worker_id: str, look_up: Coroutine[Any, Any, Ending]) -> None:
        self._worker_id = worker_id
        self._is_late = False
        self._task = asyncio.ensure_future(self._run(look_up))

    async def result(self) -> Ending:
        """How it ended; after 1.8 s an Ending without the cause, which the log has once it is found."""
        await asyncio.wait([self._task], timeout=_LIMIT_S)
        if self._task.done():
            return self._task.result()
        self._is_late = True
        return Ending(f"has ended; its node did not report the cause within {_LIMIT_S:g} s. The log shows it when it arrives")

    async def _run(self, look_up: Coroutine[Any, Any, Ending]) -> Ending:
        try:
            ending = await look_up
        except Exception as error:  # noqa: BLE001 - the calls must end
            ending = Ending(f"has ended; the look-up of its exit failed: {error}")
        if self._is_late:
            log.warning("%s %s", self._worker_id, ending.cause)
        return ending
