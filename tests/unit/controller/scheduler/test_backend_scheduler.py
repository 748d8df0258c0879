"""Tests of BackendScheduler with a minimal backend, and of controllers with any Scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helmsman import Cluster, ClusterConfig, InlineScheduler, ResourceManager, TrainController
from helmsman._base.event_loop import Deadline
from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._placement.allocator import Allocator
from helmsman.controller._placement.placement import Placement
from helmsman.controller._placement.resources import ClusterSnapshot, NodeState
from helmsman.controller._scheduler.backend import Backend, Launch, Run
from helmsman.controller._scheduler.backend_scheduler import BackendScheduler
from helmsman.controller._scheduler.inline import InlineTransport
from helmsman.controller._scheduler.transport.client import WorkerClient
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.worker_groups import Shard
from tests.contract.engines import Counter
from tests.controller.engines import RecordingTrainer


class OneNode(Allocator):
    """One node that is always free."""

    def snapshot(self) -> ClusterSnapshot:
        cpus = {"CPU": 8.0}
        return ClusterSnapshot(
            nodes=(NodeState(node_id="n", address="127.0.0.1", total=cpus, available=cpus),)
        )

    async def reserve(
        self,
        jobs: Sequence[Job],
        deadline: Deadline,
        resources: Mapping[str, contextlib.AsyncExitStack],
    ) -> Mapping[str, Sequence[Placement]]:
        roles = self.plan(jobs).roles
        return {
            role.role: [Placement.planned(worker, role.accelerator) for worker in role.workers]
            for role in roles
        }


class MinimalBackend(Backend):
    """Workers in this process."""

    shares_process = True
    allocator = OneNode()

    def __init__(self) -> None:
        self.store = SegmentStore()
        self.closed = False

    async def launch(self, start: Launch) -> list[WorkerClient]:
        clients = []
        for rank, place in start.places.items():
            identity = self.run.identity(start.job, rank, place.node)
            host = EngineHost(identity, self.store, seeding=False)
            host.engine_thread.start(identity.worker_id)
            transport = InlineTransport(host, on_end=lambda: None)
            start.undo.push_async_callback(transport.kill)
            clients.append(
                WorkerClient(
                    identity.worker_id, place, os.getpid(), "", transport, self.run.timeouts
                )
            )
        return clients

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[BackendScheduler]:
    # ranks set environment variables in this process
    with mock.patch.dict(os.environ), BackendScheduler(MinimalBackend(), log_dir=tmp_path) as made:
        yield made


def test_backend_scheduler_with_a_minimal_backend(scheduler: BackendScheduler) -> None:
    assert scheduler.create_workers([Job(role="a", replicas=2), Job(role="b")]) == [
        "a/0",
        "a/1",
        "b/0",
    ]
    asyncio.run(scheduler.create_engine("a/0", Counter))
    assert scheduler.call_engine("a/0", "add", None, 2) == 2
    handle = scheduler.put([1, 2])
    assert scheduler.call_engine("a/0", "echo", None, handle) == scheduler.get(handle) == [1, 2]
    scheduler.restart_worker("a/0")
    with pytest.raises(errors.EngineNotFoundError):
        scheduler.call_engine("a/0", "add")
    assert scheduler.scale("a", 3) == ["a/2"]
    scheduler.remove_workers("a", ["a/1"])
    assert [status.worker_id for status in scheduler.status()] == ["a/0", "a/2", "b/0"]
    assert [reservation.node_id for reservation in scheduler.reserve(Job(role="held"))] == ["n"]
    assert (scheduler.n_gpus_per_node, asyncio.run(scheduler.preemption_notices())) == (0, {})


def test_backend_scheduler_serves_controllers(scheduler: BackendScheduler) -> None:
    with TrainController(scheduler, RecordingTrainer, Job(role="train", replicas=2)) as trainer:
        trainer.initialize()
        assert len(trainer.workers) == 2


class Failing(MinimalBackend):
    def open(self, run: Run, find_worker: Any) -> None:
        raise ConnectionError("no cluster")


def test_backend_scheduler_closes_a_backend_that_fails() -> None:
    backend = Failing()
    with pytest.raises(ConnectionError, match="no cluster"):
        BackendScheduler(backend)
    assert backend.closed


# --- a scheduler without a backend ----------------------------------------------------------------


def _delegating(name: str) -> Any:
    if isinstance(inspect.getattr_static(InlineScheduler, name), property):
        return property(lambda self: getattr(self.inner, name))
    return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)


Foreign: Any = type(
    "Foreign", (Scheduler,), {name: _delegating(name) for name in Scheduler.__abstractmethods__}
)
"""A scheduler with the abstract methods of the contract and nothing else."""


class Member:
    """One rank of a group."""

    def doubled(self, values: list[int]) -> list[int]:
        return [2 * value for value in values]


def test_controllers_with_any_scheduler(tmp_path: Path) -> None:
    with InlineScheduler(log_dir=tmp_path) as inner:
        foreign = Foreign()
        foreign.inner, foreign.timeouts = inner, inner.timeouts
        with ResourceManager(0, scheduler=foreign) as resources:
            cluster = Cluster("group", Member, resources, ClusterConfig(world_size=2))  # type: ignore[var-annotated]
            assert cluster.execute_all_sync("doubled", values=[1, 2]) == [[2, 4], [2, 4]]
            assert cluster.execute_all_sync("doubled", Shard([1, 2])) == [[2], [4]]
            with pytest.raises(errors.GroupCallError, match="doubled"):
                cluster.execute_all_sync("doubled", None)
            cluster.close()
        with TrainController(foreign, RecordingTrainer, Job(role="train")) as trainer:
            trainer.initialize()
