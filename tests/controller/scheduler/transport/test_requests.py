"""Requests to a local worker: undecodable ones, late ones, and the memory of their arguments."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from helmsman._base.event_loop import run_sync, submit
from helmsman._wire.codec import encode
from helmsman._wire.messages import Request, Verb
from helmsman._wire.segments import spares
from helmsman._wire.wire import Outgoing
from helmsman.api import errors
from helmsman.api.scheduler import Call, Job, Scheduler, WorkerState
from helmsman.controller._groups.call_all import call_all
from helmsman.controller._scheduler.local import LocalScheduler
from helmsman.controller._scheduler.transport.client import WorkerClient, await_reply, request_ids
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, held, wait_until


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    with LocalScheduler(log_dir=tmp_path_factory.mktemp("logs"), preload=()) as made:
        yield made


@pytest.fixture
def engine(scheduler: Scheduler) -> Iterator[Engine]:
    (worker,) = scheduler.create_workers(Job(role="asked"))
    yield Engine.create(scheduler, worker, Counter)
    scheduler.delete_workers("asked")


def _client(engine: Engine) -> WorkerClient:
    client: WorkerClient = engine.scheduler._roles.client(engine.worker_id)  # type: ignore[attr-defined]
    return client


def test_request_undecodable_is_refused(engine: Engine) -> None:
    pid = engine.call("pid")

    async def send() -> object:
        request = Request(next(request_ids), Verb.CALL, 5, "add")  # type: ignore[arg-type]
        outgoing = Outgoing(request, encode(((), {})))
        return await await_reply(_client(engine), outgoing, LIMIT_S, "this test")

    for _ in range(3):
        with pytest.raises(
            errors.ProtocolError, match="could not be decoded: Expected `str | null`, got `int`"
        ):
            run_sync(send())
    assert (engine.call("add"), engine.call("pid")) == (1, pid)


def test_timeout_frees_arguments(engine: Engine, gate: Gate) -> None:
    before = _segments()
    with held(engine, gate):
        with pytest.raises(errors.CallTimeoutError):
            engine.call("echo", bytearray(32 << 20), timeout=0.2)
        wait_until(lambda: _segments() <= before, "the script releases the segment")


def _segments() -> set[int]:
    """Return the inodes of the segments of this process."""
    spares.drop()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = Path("/proc/self/fd", name)
            if "memfd:helmsman-" in os.readlink(path):
                found.add(path.stat().st_ino)
    return found


def _wait_located(engine: Engine) -> None:
    """Wait until the worker has reported the state of a call that is close to its limit."""
    in_flight = _client(engine).in_flight
    wait_until(lambda: any(each._seen for each in list(in_flight.values())), "the call is located")


@pytest.mark.parametrize("how", ["sync", "async", "group"])
def test_timeout_just_after_result(engine: Engine, gate: Gate, how: str) -> None:
    future: concurrent.futures.Future[Any]
    if how == "group":
        calls = {engine.worker_id: Call(gate.files)}
        future = submit(call_all(engine.scheduler, "asked", "wait", calls, timeout=3.5))
    elif how == "async":
        future = engine.begin("wait", *gate.files, timeout=3.5)
    else:
        future = submit(asyncio.to_thread(lambda: engine.call("wait", *gate.files, timeout=3.5)))
    _wait_located(engine)
    gate.open()
    assert future.result(timeout=LIMIT_S) in (1, [1])
    assert engine.state is WorkerState.READY


def test_timeout_just_after_death(engine: Engine, gate: Gate) -> None:
    pid = engine.call("pid")
    future = engine.begin("wait", *gate.files, timeout=3.5)
    _wait_located(engine)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.WorkerFailedError) as caught:
        future.result(timeout=LIMIT_S)
    assert (caught.value.method, caught.value.running) == ("wait", f"{engine.worker_id}.wait")


@pytest.mark.parametrize("num_items", [1 << 15, 1 << 18])
def test_arguments_without_descriptors(engine: Engine, num_items: int) -> None:
    """Arguments for which the script lacks a descriptor fail their own call alone."""
    value, limits = numpy.ones(num_items), resource.getrlimit(resource.RLIMIT_NOFILE)
    spares.drop()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            engine.call("total", value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not _client(engine).in_flight
    assert engine.call("total", value) == num_items


def test_arguments_of_all_sizes_arrive_in_order(engine: Engine) -> None:
    """Neither the script's thread nor the event loop overtakes the one that packs more bytes."""
    sizes = [1 << 23, 1 << 17, 8, 1 << 20, 1 << 22, 1 << 16] * 5

    async def calls() -> None:
        await asyncio.gather(
            *(
                engine.acall("note_number", index, numpy.zeros(size, numpy.uint8))
                for index, size in enumerate(sizes)
            )
        )

    asyncio.run(calls())
    assert engine.call("numbers") == list(range(len(sizes)))
