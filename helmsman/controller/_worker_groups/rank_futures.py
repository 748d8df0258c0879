"""Futures of the single ranks of a group call."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

from helmsman.api.fan_out import Fanout
from helmsman.controller._aio.event_loop import run_on_loop

_Future: TypeAlias = "concurrent.futures.Future[Any]"


def settle(futures: Sequence[_Future], call: _Future) -> None:
    """Resolve futures that are pending when their call ends, with the outcome of the call.

    Args:
        futures: A future for each rank.
        call: The call; its result is a list of the ranks' results.
    """

    def done(_: _Future) -> None:
        for index, future in enumerate(futures):
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has an outcome
                if call.cancelled():
                    future.cancel()
                elif (error := call.exception()) is not None:
                    future.set_exception(error)
                else:
                    future.set_result(call.result()[index])

    call.add_done_callback(done)


class RankFutures:
    """Makes the futures of a call's ranks when they are requested; most calls need none.

    Args:
        worker_ids: Workers whose results the call returns, in their order.
    """

    def __init__(self, worker_ids: Sequence[str]) -> None:
        self._futures: dict[str, _Future] = {}
        """Changed and read on the event loop alone, like the fan-out."""
        self._worker_ids = worker_ids
        self._fanout: Fanout | None = None

    def follow(self, fanout: Fanout) -> None:
        """Take results from a fan-out; runs on the event loop."""
        self._fanout = fanout
        fanout.on_end = self._ended
        for worker_id in (*fanout.results, *fanout.failures):
            self._ended(worker_id)

    def make(self, call: _Future) -> list[_Future]:
        """Make the futures, in the order of the workers.

        A rank without an outcome of its own gets that of the call: its error or cancellation.
        """
        made: dict[str, _Future] = {
            worker_id: concurrent.futures.Future() for worker_id in self._worker_ids
        }

        def attach() -> None:
            self._futures = made
            if self._fanout is not None:
                self.follow(self._fanout)
            settle(list(made.values()), call)

        run_on_loop(attach)
        return list(made.values())

    def _ended(self, worker_id: str) -> None:
        if self._fanout is None or (future := self._futures.get(worker_id)) is None:
            return
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            if (error := self._fanout.failures.get(worker_id)) is not None:
                future.set_exception(error)
            else:
                future.set_result(self._fanout.results[worker_id])
