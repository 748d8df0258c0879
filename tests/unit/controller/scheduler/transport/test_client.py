"""Test of the errors that WorkerClient raises for all calls after the end of its worker."""

from __future__ import annotations

import asyncio

import pytest

from helmsman._base.readiness import Leader
from helmsman._wire.codec import encode
from helmsman._wire.messages import Request, Verb
from helmsman._wire.wire import Outgoing
from helmsman.api.errors import WorkerFailedError
from helmsman.api.scheduler import Timeouts, WorkerState
from helmsman.controller._placement.placement import Placement
from helmsman.controller._scheduler.transport.base import (
    Awaited,
    Ending,
    Transport,
    TransportLostError,
)
from helmsman.controller._scheduler.transport.client import WorkerClient, await_reply, request_ids
from tests.unit.controller.rollout.backends import virtually

NUM_CALLS = 50


class LostTransport(Transport):
    """Transport of a worker that ends when all calls are pending.

    Args:
        outcome: Outcome of the look-up of the worker's end; None for a look-up without an answer.
    """

    def __init__(self, outcome: Ending | Exception | None) -> None:
        self._outcome = outcome
        self._pending: list[Awaited] = []
        self.look_ups: list[asyncio.Task[object] | None] = []

    def post(self, outgoing: Outgoing, awaited: Awaited, leader: Leader | None = None) -> None:
        self._pending.append(awaited)
        if len(self._pending) == NUM_CALLS:
            for each in self._pending:
                each.failed(TransportLostError())

    async def ending(self) -> Ending:
        self.look_ups.append(asyncio.current_task())
        if self._outcome is None:
            await asyncio.Event().wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    async def kill(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (Ending("was ended by SIGSEGV"), "was ended by SIGSEGV"),
        (None, "did not report the cause"),
        (OSError("no route"), "exit failed: no route"),
    ],
)
@virtually
async def test_client_looks_up_an_end_once(outcome: Ending | Exception | None, cause: str) -> None:
    transport = LostTransport(outcome)
    client = WorkerClient("a/0", Placement(node="n"), 1, "", transport, Timeouts())
    outgoing = [
        Outgoing(Request(next(request_ids), Verb.CALL, None, "f"), encode(()))
        for _ in range(NUM_CALLS)
    ]
    calls = (await_reply(client, each, 60.0, "the test") for each in outgoing)
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert len(transport.look_ups) == 1
    assert client.state is WorkerState.FAILED
    assert all(
        isinstance(failure, WorkerFailedError) and cause in failure.cause for failure in failures
    )
