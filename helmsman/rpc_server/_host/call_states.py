"""States of a worker's calls: waiting, running, ended or withdrawn."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Literal

import msgspec

from helmsman._wire.messages import CallState
from helmsman.rpc_server._host.threads import EngineLoop, EngineThread, task_stack, thread_stack

_REMEMBERED = 10_000


class CallStates:
    """Locates and withdraws the calls of one host, on any thread."""

    def __init__(self, engine_thread: EngineThread, loop: EngineLoop) -> None:
        self._engine_thread, self._loop = engine_thread, loop
        self._cancelled: dict[object, None] = {}
        """Ids of recent requests that were cancelled before they arrived, in case they still do."""

    def is_cancelled(self, request_id: object) -> bool:
        """Return whether a request that arrives now must not begin."""
        return request_id in self._cancelled

    def cancel(self, request_id: object) -> CallState:
        """Withdraw a call that has not begun; return its state."""
        for place in (self._engine_thread, self._loop):
            if place.waiting.withdraw(request_id):
                return _behind("withdrawn", place)
        seen = self.inspect([request_id])[request_id]
        if seen.state == "ended":
            self._cancelled[request_id] = (
                None  # CANCEL may overtake a request that is still being packed or transferred
            )
            if len(self._cancelled) > _REMEMBERED:
                del self._cancelled[next(iter(self._cancelled))]
        return seen

    def inspect(self, request_ids: Collection[object]) -> dict[object, CallState]:
        """Return the states of calls, by id."""
        # Checked before the running calls; otherwise a call that begins in between would be missed.
        places = (self._engine_thread, self._loop)
        waiting = {
            request_id: place
            for place in places
            for request_id in request_ids
            if place.waiting.has(request_id)
        }
        behind = {
            place: _behind("waiting", place) for place in {*waiting.values(), self._engine_thread}
        }
        running, now = self._engine_thread.occupant, time.monotonic()
        tasks = {call.request_id: call for call in list(self._loop.running.values())}

        def state_of(request_id: object) -> CallState:
            if request_id in waiting:
                return behind[waiting[request_id]]
            if running and running.request_id == request_id:
                return msgspec.structs.replace(behind[self._engine_thread], state="running")
            call = tasks.get(request_id)
            if call is None or call.task is None:
                return CallState(state="ended")
            stack = task_stack(call.task)
            return CallState(
                state="running", stack=stack, running=call.name, running_s=now - call.since
            )

        return {request_id: state_of(request_id) for request_id in request_ids}


def _behind(state: Literal["waiting", "withdrawn"], place: EngineThread | EngineLoop) -> CallState:
    running = place.occupant
    return CallState(
        state=state,
        stack=thread_stack(place.thread),
        running=running.name if running else None,
        running_s=time.monotonic() - running.since if running else None,
    )
