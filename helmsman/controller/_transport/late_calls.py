"""LateCalls: locates and withdraws the timed-out calls of one worker, and makes their errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from helmsman.api import errors
from helmsman.rpc_server._wire.messages import CallState, Request, Verb, dotted

log = logging.getLogger(__name__)

_WITHDRAWAL_S = 0.1
"""Longest wait for the withdrawal of a queued call, so that its timeout error can report it."""
_LATE_ANSWER_S = 60.0
"""Limit for a worker to withdraw or locate a late call; the caller does not wait for it."""


class LateCalls:
    """The calls of one worker that are about to time out, or have timed out.

    Args:
        worker_id: Id of the worker.
        log_path: Its log file, for errors.
        control: Sends a control verb to it and returns the reply.
        in_background: Runs a coroutine as a task.
    """

    def __init__(
        self,
        worker_id: str,
        log_path: str,
        control: Callable[..., Coroutine[Any, Any, Any]],
        in_background: Callable[
            [Coroutine[Any, Any, CallState | None]], asyncio.Task[CallState | None]
        ],
    ) -> None:
        self._worker_id, self._log_path = worker_id, log_path
        self._control, self._in_background = control, in_background
        self.overdue: set[int] = set()
        """Ids of timed-out requests that are still unanswered."""
        self._to_locate: list[int] = []
        self._locating: asyncio.Task[dict[int, CallState]] | None = None
        """The pending INSPECT request for all of ``_to_locate``, until it is sent."""

    async def locate(self, request_id: int, limit_s: float) -> CallState | None:
        """Ask the worker for the state of a call; None without a reply in time.

        Calls located at the same time share one request.
        """
        self._to_locate.append(request_id)
        if self._locating is None:
            self._locating = asyncio.ensure_future(self._locate_all(limit_s))
        found = await asyncio.shield(self._locating)
        return found.get(request_id)

    async def _locate_all(self, limit_s: float) -> dict[int, CallState]:
        await asyncio.sleep(0)  # collects the calls that become late at the same time
        request_ids, self._to_locate, self._locating = self._to_locate, [], None
        try:
            found: dict[int, CallState] = await self._control(
                Verb.INSPECT, request_ids, limit_s=limit_s
            )
        except errors.CallError:  # the timeout errors are raised without the calls' states
            return {}
        return found

    async def error_of(
        self,
        request: Request,
        elapsed_s: float,
        limit_s: float,
        source: str,
        seen: CallState | None,
        *,
        may_withdraw: bool,
    ) -> errors.CallTimeoutError:
        """Make the error of a timed-out call.

        A call that has not begun is withdrawn if ``may_withdraw``, and the error waits briefly for
        that. ``source`` names the setting of the limit; ``seen`` is the result of ``locate``.
        """
        state, stack = "it did not reply within the limit", ""
        if request.verb in (Verb.CALL, Verb.CREATE_ENGINE):
            if seen is None:
                state = "the state of the call is unknown; it is logged once the worker reports it"
            if may_withdraw or seen is None:
                found = self._in_background(
                    self._follow(
                        request, elapsed_s, is_seen=seen is not None, may_withdraw=may_withdraw
                    )
                )
                if seen is not None and seen.state != "running":
                    await asyncio.wait([found], timeout=_WITHDRAWAL_S)
                    seen = found.result() or seen if found.done() else seen
        if seen is not None:
            state, stack = seen.describe(may_withdraw=may_withdraw), seen.stack
        return errors.CallTimeoutError(
            worker_id=self._worker_id,
            engine_name=request.engine_name,
            method=request.method or request.verb.value,
            elapsed_s=elapsed_s,
            limit_s=limit_s,
            limit_source=source,
            worker_alive=seen is not None,
            state=state,
            stack=stack,
            log_path=self._log_path,
        )

    async def _follow(
        self, request: Request, elapsed_s: float, *, is_seen: bool, may_withdraw: bool
    ) -> CallState | None:
        """Withdraw or locate a late call; log its state if the error could not report it.

        Returns None without a reply.
        """
        call: CallState | None = None
        with contextlib.suppress(errors.CallError):
            if may_withdraw:
                call = await self._control(Verb.CANCEL, request.id, limit_s=_LATE_ANSWER_S)
            else:
                call = await self.locate(request.id, _LATE_ANSWER_S)
        if call is not None and call.state == "withdrawn":
            self.overdue.discard(request.id)
        if call is not None and not is_seen:
            place = call.describe(may_withdraw=may_withdraw)
            stack = f"; its engine thread is at:\n{call.stack}" if call.stack else ""
            log.warning(
                "%s: %s timed out after %.2f s: %s%s",
                self._worker_id,
                dotted(request.engine_name, request.method or request.verb.value),
                elapsed_s,
                place,
                stack,
            )
        return call
