"""Values arrive unchanged and belong to their receiver; results can stay in their worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import numpy
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, ResultHandle, Scheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Driver, Engine, wait_gone
from tests.contract.marks import needs_processes, only_local, ray_smoke

LARGE_BYTES = 32 << 20


@pytest.mark.parametrize("size", [100, 200_000, pytest.param(8 << 20, marks=ray_smoke)])
def test_payload_belongs_to_receiver(engine: Engine, size: int) -> None:
    import torch

    array = numpy.full(size, 7, dtype=numpy.uint8)
    assert engine.call("total", array) == 7 * size
    filled = engine.call("fill", array, 9)
    assert filled.sum() == 9 * size
    assert array.sum() == 7 * size, "the sender's array is unchanged"
    filled[0] = 1
    made = engine.call("make", size)
    made[:] = 0
    assert engine.call("make", size).sum() == 7 * size
    tensor = torch.full((size,), 7, dtype=torch.uint8)
    assert engine.call("fill", tensor, 9).sum() == 9 * size
    assert tensor.sum() == 7 * size


def test_payload_classes_of_script(run_driver: Callable[..., Driver]) -> None:
    driver = run_driver(
        """
import dataclasses, msgspec


@dataclasses.dataclass
class Point:
    x: int
    y: int = 2


class Setting(msgspec.Struct):
    name: str


class OwnError(Exception):
    pass


class Engine:
    def __init__(self, start: Point) -> None:
        self.point = start

    def move(self, by: Point, setting: Setting) -> Point:
        return Point(self.point.x + by.x, self.point.y + by.y)

    def fail(self) -> None:
        raise OwnError("mine")


with make() as scheduler:
    scheduler.create_workers(Job(role="a"))
    asyncio.run(scheduler.create_engine("a/0", Engine, None, Point(1)))
    moved = scheduler.call_engine("a/0", "move", None, Point(10, 20), Setting("s"))
    try:
        scheduler.call_engine("a/0", "fail")
    except errors.EngineCallError as error:
        cause = error.__cause__
    is_point, is_own = isinstance(moved, Point), isinstance(cause, OwnError)
    tell(moved=[moved.x, moved.y], is_point=is_point, is_own=is_own)
"""
    )
    assert driver.facts() == {"moved": [11, 22], "is_point": True, "is_own": True}
    assert driver.wait() == 0, driver.errors()


# --- kept results ---------------------------------------------------------------------------------


@ray_smoke
def test_kept_result_moves_between_workers(engine: Engine, peer: Engine, backend: str) -> None:
    handle = engine.call("make", LARGE_BYTES, rpc_meta={"keep": True})
    assert isinstance(handle, ResultHandle)
    assert handle.worker_id == engine.worker_id
    assert handle.nbytes >= LARGE_BYTES
    assert "ndarray" in handle.summary
    assert len(msgspec.json.encode([handle.id, handle.summary])) < 1000
    before = _resident_bytes()
    assert peer.call("total", handle) == 7 * LARGE_BYTES
    assert peer.call("total", handle, handle) == 14 * LARGE_BYTES, "a handle can be reused"
    assert engine.call("total", handle) == 7 * LARGE_BYTES, "the maker can use it, too"
    inside = peer.call("echo", {"weights": [handle]})
    assert inside["weights"][0].nbytes == LARGE_BYTES
    del inside
    if backend == "local":
        grown = _resident_bytes() - before
        assert grown < LARGE_BYTES + (16 << 20), "only the echo came to the script"
    written = peer.call("fill", handle, 1)
    assert written.sum() == LARGE_BYTES
    assert engine.call("total", handle) == 7 * LARGE_BYTES, "a receiver writes to its own copy"

    engine.scheduler.release(handle)
    engine.scheduler.release(handle)
    for target in (engine, peer):
        with pytest.raises(
            errors.HandleLostError,
            match=f"handle {handle.id} \\(made by {engine.worker_id}\\) no longer exists",
        ):
            target.call("total", handle)
    with pytest.raises(errors.HandleLostError):
        Engine.create(peer.scheduler, peer.worker_id, Counter, f"from-{handle.id}", handle)
    assert engine.call("add") == 1


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def test_kept_result_small(engine: Engine, peer: Engine) -> None:
    handle = engine.call("echo", {"a": [1, 2]}, rpc_meta={"keep": True})
    assert peer.call("echo", handle) == {"a": [1, 2]}
    assert engine.call("echo", None, rpc_meta={"keep": True}) is None, "None needs no handle"
    asynchronous = engine.call("async_add", 3, rpc_meta={"keep": True})
    assert peer.call("add", asynchronous) == 3


@needs_processes
def test_kept_result_dies_with_worker(scheduler: Scheduler, role: str, peer: Engine) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    maker = Engine.create(scheduler, worker, Counter)
    handle = maker.call("make", 1 << 20, rpc_meta={"keep": True})
    assert peer.call("total", handle) == 7 << 20
    pid = maker.call("pid")
    os.kill(pid, signal.SIGKILL)
    wait_gone({"maker": pid})
    with pytest.raises((errors.HandleLostError, errors.WorkerFailedError)):
        maker.call("add")
    with pytest.raises(errors.HandleLostError) as caught:
        peer.call("total", handle)
    assert caught.value.worker_id == worker
    scheduler.release(handle)
    assert peer.call("add") == 1


# --- random numbers -------------------------------------------------------------------------------


@needs_processes
def test_seeds_of_role_and_rank(scheduler: Scheduler, role: str) -> None:
    def draw(name: str, replicas: int) -> list[Any]:
        workers = scheduler.create_workers(Job(role=name, replicas=replicas))
        engines = [
            Engine.create(scheduler, worker, "tests.contract.drawing.Drawing") for worker in workers
        ]
        drawn = [(*engine.call("drawn_first"), *engine.call("draw")) for engine in engines]
        second = Engine.create(scheduler, workers[0], "tests.contract.drawing.Drawing", "second")
        assert second.call("drawn_first") != drawn[0][:3], "a second engine draws other numbers"
        scheduler.delete_workers(name)
        return drawn

    first = draw(f"{role}-a", 2)
    again = draw(f"{role}-a", 2)
    other_role = draw(f"{role}-b", 1)
    assert first == again, "seed, role and rank decide the numbers"
    for index in range(6):
        numbers = {first[0][index], first[1][index], other_role[0][index]}
        assert len(numbers) == 3, "ranks and roles differ, for each library"


@only_local
def test_payload_without_descriptors(own: Engine) -> None:
    """A payload that lacks a descriptor fails alone; Ray itself would end such a worker."""
    own.call("apply", _take_all_descriptors)
    with pytest.raises(errors.ProtocolError, match="its arguments could not be taken"):
        own.call("total", numpy.ones(1 << 20))
    with pytest.raises(errors.EngineCallError, match="Too many open files"):
        own.call("make", 1 << 20)
    own.call("apply", _release_descriptors)
    assert own.call("total", own.call("make", 1 << 20)) == 7 << 20


_TAKEN: list[int] = []


def _take_all_descriptors() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            _TAKEN.append(os.dup(1))
    except OSError:
        return


def _release_descriptors() -> None:
    while _TAKEN:
        os.close(_TAKEN.pop())
