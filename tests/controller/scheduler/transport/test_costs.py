"""Costs of a call, in units that do not depend on the machine's speed."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pytest

from helmsman._base.event_loop import background_loop, run_sync
from helmsman._wire import wire as wire_module
from helmsman._wire.codec import encode
from helmsman._wire.messages import Reply, Request, Verb
from helmsman._wire.segments import ShmSegment, pack
from helmsman._wire.session import Session
from helmsman._wire.wire import ReplyFrame, RequestFrame, encode_frame, to_wire
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._scheduler.local import LocalScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine

NUM_CALLS = 50
NUM_WORKERS = 4


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    with LocalScheduler(log_dir=tmp_path_factory.mktemp("logs"), preload=()) as made:
        yield made


@pytest.fixture(scope="module")
def engines(scheduler: Scheduler) -> list[Engine]:
    """Provide a Counter in each worker, which has answered before."""
    workers = scheduler.create_workers(Job(role="counted", replicas=NUM_WORKERS))
    made = [Engine.create(scheduler, worker, Counter) for worker in workers]
    for each in made * 3:
        each.call("echo", None)
    return made


@pytest.fixture
def tasks() -> Iterator[Tally[str]]:
    """Count the tasks that Helmsman's event loop starts, by the name of their coroutine."""
    counted: Tally[str] = Tally()
    loop = background_loop()

    def count(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        counted[coroutine.__qualname__] += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(count)
    yield counted
    loop.set_task_factory(None)


def test_call_engine_makes_no_task(engines: list[Engine], tasks: Tally[str]) -> None:
    async def calls() -> None:
        for _ in range(NUM_CALLS):
            await engines[0].acall("echo", None)

    for _ in range(NUM_CALLS):
        engines[0].call("echo", None)
    assert not tasks, tasks
    run_sync(calls())
    assert tasks.total() <= 1, tasks  # the task of run_sync


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


def test_copied_bytes(
    scheduler: Scheduler, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of an argument is copied once for all workers; results are not copied."""
    copied: list[int] = []

    def count(buffers: Sequence[Any]) -> ShmSegment:
        copied.append(sum(memoryview(each).nbytes for each in buffers))
        return pack(buffers)

    monkeypatch.setattr(wire_module, "pack", count)
    value = numpy.ones(1 << 18)
    assert engines[0].call("total", value) == 1 << 18
    assert copied == [value.nbytes]
    copied.clear()
    assert engines[0].call("make", 1 << 21).sum() == 7 << 21
    assert not copied
    handle = scheduler.put(value)
    for each in (*engines[:2], engines[0]):
        assert each.call("total", handle) == 1 << 18
    assert sum(copied) - value.nbytes < 1000
    scheduler.release(handle)
