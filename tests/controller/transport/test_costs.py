"""What a call costs, in things that can be counted on a machine of any speed."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pytest

from helmsman.api.scheduler import Call, Job, Scheduler
from helmsman.controller._aio.event_loop import background_loop, run_sync
from helmsman.controller._roles.call_all import call_all
from helmsman.rpc_server._wire import wire as wire_module
from helmsman.rpc_server._wire.codec import encode
from helmsman.rpc_server._wire.messages import Reply, Request, Verb
from helmsman.rpc_server._wire.segments import ShmSegment, pack
from helmsman.rpc_server._wire.wire import ReplyFrame, RequestFrame, Session, encode_frame, to_wire
from tests.contract.engines import Counter
from tests.contract.helpers import Engine

NUM_CALLS = 50


@pytest.fixture
def tasks() -> Iterator[Tally[str]]:
    """Counts the tasks that Helmsman's event loop starts, by the name of their coroutine."""
    counted: Tally[str] = Tally()
    loop = background_loop()

    def count(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        counted[coroutine.__qualname__] += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(count)
    yield counted
    loop.set_task_factory(None)


def _warm(engine: Engine) -> None:
    for _ in range(3):
        engine.call("echo", None)


def test_call_engine_makes_no_task(engine: Engine, tasks: Tally[str]) -> None:
    _warm(engine)
    tasks.clear()
    for _ in range(NUM_CALLS):
        engine.call("echo", None)
    assert not tasks, tasks


def test_async_call_engine_makes_no_task(engine: Engine, tasks: Tally[str]) -> None:
    async def calls() -> None:
        for _ in range(NUM_CALLS):
            await engine.acall("echo", None)

    _warm(engine)
    tasks.clear()
    run_sync(calls())
    assert tasks.total() <= 1, tasks  # run_sync's own


def test_calls_do_not_leak(engine: Engine) -> None:
    def blocks_after(num_calls: int) -> int:
        for _ in range(num_calls):
            engine.call("echo", [1, "two"])
        gc.collect()
        return sys.getallocatedblocks()

    blocks_after(300)
    before = blocks_after(300)
    assert blocks_after(600) - before < 300, "half a block for each call would already be a leak"


@pytest.mark.parametrize(
    ("arguments", "most_bytes"), [(((), {}), 64), (((1, "two"), {"three": 3.0}), 100)]
)
def test_message_size(arguments: Any, most_bytes: int) -> None:
    request, payload = Request(1000, Verb.CALL, "actor/0", "step"), encode(arguments)
    wire, segment = to_wire(payload)
    assert segment is None
    assert len(Session().keep(encode_frame(RequestFrame(request, wire)))) <= most_bytes
    reply, nothing = Reply(1000, True), encode(None)
    assert len(encode_frame(ReplyFrame(reply, to_wire(nothing)[0]))) <= 24


@pytest.mark.not_on("inline", "nothing is sent")
def test_call_all_encodes_once(
    scheduler: Scheduler, role: str, tasks: Tally[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = scheduler.create_workers(Job(role=role, replicas=4))
    for worker in workers:
        Engine.create(scheduler, worker, Counter, worker)
    payload = encode((([1, "two"],), {}))
    calls = {worker: Call(payload=payload) for worker in workers}
    made: list[bytes] = []
    encode_body = wire_module.encode_frame

    def count(frame: Any) -> bytes:
        made.append(encode_body(frame))
        return made[-1]

    monkeypatch.setattr(wire_module, "encode_frame", count)
    tasks.clear()
    results = run_sync(call_all(scheduler, role, "echo", calls))
    assert results == [[1, "two"]] * 4
    assert len(made) == 1
    assert tasks.total() == 1, tasks  # run_sync's own


@pytest.mark.not_on("inline", "nothing is sent")
def test_segments_reused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[str] = []
    memfd_create = os.memfd_create

    def count(name: str, flags: int) -> int:
        created.append(name)
        return memfd_create(name, flags)

    value = numpy.ones(1 << 20)
    for _ in range(5):
        engine.call("total", value)
    monkeypatch.setattr(os, "memfd_create", count)
    for _ in range(20):
        assert engine.call("total", value) == 1 << 20
    # The worker may still unmap one when the next is packed.
    assert len(created) <= 2


@pytest.mark.not_on("inline", "nothing is sent")
def test_copied_bytes(
    scheduler: Scheduler, engine: Engine, peer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of an argument once, for however many workers; none of a result."""
    copied: list[int] = []

    def count(buffers: Sequence[Any]) -> ShmSegment:
        copied.append(sum(memoryview(each).nbytes for each in buffers))
        return pack(buffers)

    monkeypatch.setattr(wire_module, "pack", count)
    value = numpy.ones(1 << 18)
    assert engine.call("total", value) == 1 << 18
    assert copied == [value.nbytes]
    copied.clear()
    assert engine.call("make", 1 << 21).sum() == 7 << 21
    assert not copied
    handle = scheduler.put(value)
    for each in (engine, peer, engine):
        assert each.call("total", handle) == 1 << 18
    assert sum(copied) - value.nbytes < 1000
    scheduler.release(handle)
