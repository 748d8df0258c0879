"""The controller's view of one worker: the end of its calls when it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from helmsman.api.errors import WorkerFailedError
from helmsman.api.scheduler import Timeouts, WorkerState
from helmsman.controller._aio.event_loop import run_sync
from helmsman.controller._placement.placement import Placement
from helmsman.controller._transport.base import Awaited, Ending, Transport, TransportLostError
from helmsman.controller._transport.client import WorkerClient, await_reply, request_ids
from helmsman.rpc_server._wire.codec import encode
from helmsman.rpc_server._wire.messages import Request, Verb
from helmsman.rpc_server._wire.wire import Outgoing

NUM_CALLS = 500


class LostTransport(Transport):
    """Carries nothing: its worker has ended, as soon as all calls are there."""

    def __init__(self, look_up: Callable[[], Awaitable[Ending]]) -> None:
        self._look_up = look_up
        self._waiting: list[Awaited] = []
        self.num_look_ups = 0

    def post(self, outgoing: Outgoing, awaited: Awaited) -> None:
        self._waiting.append(awaited)
        if len(self._waiting) == NUM_CALLS:
            for each in self._waiting:
                each.failed(TransportLostError())

    async def ending(self) -> Ending:
        self.num_look_ups += 1
        return await self._look_up()

    async def kill(self) -> None:
        raise AssertionError


async def _known() -> Ending:
    return Ending("was ended by SIGSEGV")


async def _unanswered() -> Ending:
    return await asyncio.get_running_loop().create_future()


async def _impossible() -> Ending:
    raise OSError("no route")


@pytest.mark.parametrize(
    ("look_up", "cause"),
    [
        (_known, "was ended by SIGSEGV"),
        (_unanswered, "did not report the cause"),
        (_impossible, "exit failed: no route"),
    ],
)
def test_client_looks_up_an_end_once(look_up: Callable[[], Awaitable[Ending]], cause: str) -> None:
    transport = LostTransport(look_up)

    async def fail_all() -> tuple[WorkerClient, list[BaseException | object]]:
        client = WorkerClient("a/0", Placement(node="n"), 1, "", transport, Timeouts())
        outgoing = [
            Outgoing(Request(next(request_ids), Verb.CALL, None, "f"), encode(()))
            for _ in range(NUM_CALLS)
        ]
        calls = (await_reply(client, each, 60.0, "the test") for each in outgoing)
        return client, await asyncio.gather(*calls, return_exceptions=True)

    client, failures = run_sync(fail_all())
    assert transport.num_look_ups == 1
    assert client.state is WorkerState.FAILED
    assert all(
        isinstance(failure, WorkerFailedError) and cause in failure.cause for failure in failures
    )
