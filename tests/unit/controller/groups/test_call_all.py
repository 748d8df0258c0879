"""Tests of call_all and gather_all: concurrency, deadlines and the choice of the root cause."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmsman._base.event_loop import background_loop, run_async
from helmsman.api.errors import (
    CallTimeoutError,
    EngineCallError,
    GroupCallError,
    HelmsmanError,
    PeerNotReadyError,
    WorkerFailedError,
)
from helmsman.api.scheduler import Call, Job
from helmsman.controller._groups.call_all import (
    call_all,
    gather_all,
    group_error,
    is_communication_error,
)
from tests.controller.fakes import FakeScheduler


class Rank:
    """An engine whose calls the test ends."""

    worker_id: str

    def __init__(self) -> None:
        self.num_calls = 0
        self.begun = asyncio.Event()
        self.ended: asyncio.Future[Any] = background_loop().create_future()

    async def step(self) -> Any:
        self.num_calls += 1
        self.begun.set()
        return await self.ended

    async def meet(self, barrier: asyncio.Barrier) -> int:
        return await barrier.wait()

    async def echo(self, value: Any, *, times: int = 1) -> Any:
        return value * times


class Group:
    """A role of Rank engines on a fake scheduler, driven on the background loop."""

    def __init__(self, num_ranks: int) -> None:
        self.scheduler = FakeScheduler()
        self.ids = self.scheduler.create_workers(Job(role="train", replicas=num_ranks))

    @classmethod
    async def of(cls, num_ranks: int) -> Group:
        group = cls(num_ranks)
        for worker_id in group.ids:
            await group.scheduler.create_engine(worker_id, Rank)
        return group

    def rank(self, index: int) -> Rank:
        rank: Rank = self.scheduler.engines[self.ids[index]]
        return rank

    async def call(
        self, method: str = "step", call: Call | None = None, **options: Any
    ) -> list[Any]:
        return await call_all(
            self.scheduler, "train", method, dict.fromkeys(self.ids, call or Call()), **options
        )

    async def begin(self, **options: Any) -> asyncio.Task[list[Any]]:
        """Start a ``step`` and wait until every rank has begun it."""
        task = asyncio.create_task(self.call(**options))
        for index in range(len(self.ids)):
            await self.rank(index).begun.wait()
        return task


def on_loop(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test's coroutine on the background loop, where schedulers run."""

    @functools.wraps(test)
    async def wrapped(**fixtures: Any) -> None:
        await run_async(test(**fixtures))

    return wrapped


async def settle() -> None:
    """Run the callbacks that are ready on the loop."""
    for _ in range(10):
        await asyncio.sleep(0)


GLOO = RuntimeError(
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
    "[127.0.0.1]:26789"
)


@on_loop
async def test_call_all_results_in_order() -> None:
    group = await Group.of(3)
    calls = {
        worker_id: Call((index,), {"times": 2})
        for index, worker_id in enumerate(reversed(group.ids))
    }
    assert await call_all(group.scheduler, "train", "echo", calls) == [0, 2, 4]
    assert await call_all(group.scheduler, "train", "echo", {}) == []
    assert [call.worker_id for call in group.scheduler.sent[-3:]] == [
        "train/2",
        "train/1",
        "train/0",
    ]
    assert sorted(await group.call("meet", Call((asyncio.Barrier(3),)))) == [0, 1, 2], (
        "the calls run concurrently"
    )


@on_loop
async def test_group_error_cause_before_broken_connections() -> None:
    group = await Group.of(3)
    task = await group.begin()
    group.rank(0).ended.set_exception(GLOO)
    group.rank(2).ended.set_exception(GLOO)
    await asyncio.sleep(0)
    group.rank(1).ended.set_exception(ValueError("loss is nan"))
    with pytest.raises(GroupCallError, match="loss is nan") as caught:
        await task
    error = caught.value
    assert error.first.worker_id == "train/1"  # type: ignore[attr-defined]
    assert error.__cause__ is error.first
    assert isinstance(error.first.__cause__, ValueError)
    assert list(error.errors) == ["train/1", "train/0", "train/2"]
    assert "3 of 3 ranks (2 other rank(s) failed as well" in str(error)
    assert [group.rank(index).num_calls for index in range(3)] == [1, 1, 1]


@on_loop
async def test_group_error_death_is_the_cause() -> None:
    group = await Group.of(2)
    task = await group.begin()
    group.rank(0).ended.set_exception(GLOO)
    await asyncio.sleep(0)
    group.scheduler.kill("train/1")
    with pytest.raises(GroupCallError) as caught:
        await task
    assert isinstance(caught.value.first, WorkerFailedError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@on_loop
async def test_group_error_earliest_of_equals() -> None:
    group = await Group.of(3)
    task = await group.begin()
    for index in (2, 0, 1):
        group.rank(index).ended.set_exception(ValueError(f"from {index}"))
        await settle()
    with pytest.raises(GroupCallError) as caught:
        await task
    assert list(caught.value.errors) == ["train/2", "train/0", "train/1"]


@pytest.mark.usefixtures("young_heap")
@on_loop
async def test_call_all_logs_the_ends_of_abandoned_calls(caplog: pytest.LogCaptureFixture) -> None:
    group = await Group.of(3)
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    try:
        task = await group.begin(grace_s=0.0)
        group.rank(0).ended.set_exception(ValueError("loss is nan"))
        with pytest.raises(GroupCallError) as caught:
            await task
        assert list(caught.value.errors) == ["train/0"]
        gc.collect()  # abandoned tasks need a reference to survive this
        with caplog.at_level(logging.INFO, "helmsman.api.fan_out"):
            group.rank(1).ended.set_result(None)
            await settle()
            group.rank(2).ended.set_exception(GLOO)
            await settle()
        gc.collect()
        await settle()
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    first, second = [record for record in caplog.records if record.name == "helmsman.api.fan_out"]
    assert (first.levelno, first.getMessage()) == (
        logging.INFO,
        "train/1: step (left alone after another rank failed): ended",
    )
    assert second.levelno == logging.WARNING
    assert "train/2: step" in second.getMessage()
    assert "Connection closed" in second.getMessage()
    assert unhandled == []


@on_loop
async def test_call_all_waits_for_independent_workers() -> None:
    group = await Group.of(2)
    task = await group.begin(grace_s=None)
    group.rank(0).ended.set_exception(ValueError("out of memory"))
    await settle()
    assert not task.done()
    group.rank(1).ended.set_exception(ValueError("out of memory too"))
    with pytest.raises(GroupCallError) as caught:
        await task
    assert list(caught.value.errors) == ["train/0", "train/1"]


@on_loop
async def test_call_all_has_one_deadline() -> None:
    group = await Group.of(3)
    with pytest.raises(GroupCallError) as caught:
        await group.call(timeout=0.01)
    assert isinstance(caught.value.first, CallTimeoutError)
    assert len(caught.value.errors) == 3
    assert [group.rank(index).num_calls for index in range(3)] == [1, 1, 1]
    limits = [call.timeout for call in group.scheduler.sent if call.method == "step"]
    assert all(limit is not None and 0 < limit <= 0.01 for limit in limits)


@on_loop
async def test_call_all_cancelled_does_not_cancel_its_calls() -> None:
    group = await Group.of(2)
    task = await group.begin()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [group.rank(index).num_calls for index in range(2)] == [1, 1]


@on_loop
async def test_gather_all_raises_other_errors_unchanged() -> None:
    async def fails() -> None:
        raise KeyError("a bug")

    async def ends() -> None:
        return None

    with pytest.raises(KeyError, match="a bug"):
        await gather_all("train", "step", {"train/0": ends(), "train/1": fails()})


@pytest.mark.parametrize(
    ("remote_type", "remote_message", "is_communication"),
    [
        ("RuntimeError", str(GLOO), True),
        (
            "RuntimeError",
            "[gloo/transport/tcp/pair.cc:540] Read error [10.0.0.1]:37: Connection reset by peer",
            True,
        ),
        ("RuntimeError", "Application timeout caused pair closure", True),
        (
            "RuntimeError",
            (
                "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
                "operation"
            ),
            True,
        ),
        ("torch.distributed.DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:1690", True),
        (
            "torch.distributed.DistStoreError",
            "Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
            True,
        ),
        (
            "RuntimeError",
            (
                "ncclRemoteError: A call failed possibly due to a network error or a remote "
                "process exiting"
            ),
            True,
        ),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", True),
        ("BrokenPipeError", "[Errno 32] Broken pipe", True),
        *(
            ("RuntimeError", text, False)
            for text in ("CUDA out of memory", "connection pool is empty", "timed out")
        ),
    ],
)
def test_is_communication_error(
    remote_type: str, remote_message: str, is_communication: bool
) -> None:
    assert (
        is_communication_error(engine_error("train/0", remote_type, remote_message))
        is is_communication
    )


def engine_error(worker_id: str, remote_type: str, remote_message: str) -> EngineCallError:
    return EngineCallError(
        worker_id=worker_id,
        engine_name="actor",
        method="step",
        remote_type=remote_type,
        remote_message=remote_message,
        remote_traceback="",
    )


def collateral(worker_id: str) -> HelmsmanError:
    return PeerNotReadyError(
        worker_id=worker_id, engine_name="actor", method="step", ranks=[0], reason="its arguments"
    )


AGREED = (
    "the loss failed on another rank, so this one did not go on. rank 0: ValueError: loss is nan"
)

KINDS: list[tuple[int, Callable[[str], HelmsmanError]]] = [
    (0, lambda worker_id: engine_error(worker_id, "ValueError", "loss is nan")),
    (1, lambda worker_id: engine_error(worker_id, "RuntimeError", str(GLOO))),
    (2, collateral),
    (2, lambda worker_id: engine_error(worker_id, "RuntimeError", AGREED)),
]


@given(kinds=st.lists(st.integers(0, len(KINDS) - 1), min_size=2, max_size=12))
def test_group_error_order(kinds: list[int]) -> None:
    failures: dict[str, Exception] = {
        f"train/{index}": KINDS[kind][1](f"train/{index}") for index, kind in enumerate(kinds)
    }
    error = group_error("train", "step", failures, len(kinds))
    assert isinstance(error, GroupCallError)
    expected = sorted(range(len(kinds)), key=lambda index: (KINDS[kinds[index]][0], index))
    assert list(error.errors) == [f"train/{index}" for index in expected]
    assert error.first is failures[f"train/{expected[0]}"]
