"""Roles that use the workers of other roles, and sibling processes."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, alias_of, is_running, wait_gone, wait_until
from tests.contract.marks import needs_processes, ray_smoke


@ray_smoke
def test_alias_shares_workers(scheduler: Scheduler, role: str) -> None:
    target = scheduler.create_workers(Job(role=role, replicas=2))
    alias = scheduler.create_workers(alias_of(role, f"{role}-alias", 2))
    assert alias == [f"{role}-alias/0", f"{role}-alias/1"]
    actor = Engine.create(scheduler, target[1], Counter)
    critic = Engine.create(scheduler, alias[1], Counter)
    assert actor.call("pid") == critic.call("pid")
    assert actor.call("add", 5) == 5
    assert critic.call("add", 7) == 7, "engines have different names"
    assert scheduler.call_engine(target[1], "add", alias[1], 0) == 7, "both ids name the worker"
    assert [worker.id for worker in scheduler.get_workers(f"{role}-alias")] == alias
    with pytest.raises(errors.RoleExistsError):
        scheduler.create_workers(alias_of(role, f"{role}-alias", 2))

    scheduler.delete_workers(f"{role}-alias")
    assert actor.call("add", 0) == 5, "the target still runs"
    with pytest.raises(errors.EngineNotFoundError):
        scheduler.call_engine(target[1], "add", alias[1])
    with pytest.raises(errors.WorkerNotFoundError):
        critic.call("add")


@needs_processes
def test_alias_of_unequal_size(scheduler: Scheduler, role: str) -> None:
    target = scheduler.create_workers(Job(role=role, replicas=4))
    alias = scheduler.create_workers(alias_of(role, f"{role}-half", 2))
    engines = [Engine.create(scheduler, worker, Counter) for worker in (*target, *alias)]
    pids = [engine.call("pid") for engine in engines]
    assert pids[4:] == [pids[0], pids[2]]


@ray_smoke
@needs_processes
def test_fork_dies_alone(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(cpu=0, gpu=2)]))
    (sibling,) = scheduler.create_workers(alias_of(role, f"{role}-forked", fork=True))
    one, two = (Engine.create(scheduler, each, Counter) for each in (worker, sibling))
    pids = {"worker": one.call("pid"), "sibling": two.call("pid")}
    assert pids["worker"] != pids["sibling"]
    masks = [
        engine.call("environ", "CUDA_VISIBLE_DEVICES")["CUDA_VISIBLE_DEVICES"]
        for engine in (one, two)
    ]
    assert masks[0] == masks[1], "both have the same devices"
    assert len(masks[0].split(",")) == 2
    os.kill(pids["sibling"], signal.SIGKILL)
    with pytest.raises(errors.WorkerFailedError):
        wait_until(lambda: two.call("add") == 0, "the sibling fails")
    assert one.call("add") == 1
    scheduler.delete_workers(f"{role}-forked")
    assert one.call("add") == 2


@needs_processes
def test_delete_target_ends_forks(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    (sibling,) = scheduler.fork_workers(f"{role}-forked", role)
    assert sibling == f"{role}-forked/0"
    pids = {each: Engine.create(scheduler, each, Counter).call("pid") for each in (worker, sibling)}
    scheduler.delete_workers(role)
    wait_gone(pids)
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.get_workers(f"{role}-forked")


@needs_processes
def test_fork_workers_command(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, replicas=2))
    ids = scheduler.fork_workers(f"{role}-server", role, command="http.server --bind 127.0.0.1 0")
    assert ids == [f"{role}-server/0", f"{role}-server/1"]
    pids = {worker: scheduler.call_engine(worker, "pid", "command") for worker in ids}
    assert all(is_running(pid) for pid in pids.values())
    assert {scheduler.call_engine(worker, "poll", "command") for worker in ids} == {None}
    assert Engine.create(scheduler, ids[0], Counter).call("add") == 1, "its name is free"
    os.kill(pids[ids[0]], signal.SIGKILL)
    wait_until(
        lambda: scheduler.call_engine(ids[0], "poll", "command") == -9,
        "the command has ended",
    )
    failed = [asyncio.run(scheduler.check_health(worker)).failed_engines for worker in ids]
    assert "http.server" in failed[0]["command"]
    assert failed[0]["command"].endswith("has ended with signal 9")
    assert failed[1] == {}
    scheduler.delete_workers(f"{role}-server")
    wait_gone(pids)
    assert len(scheduler.get_workers(role)) == 2


@needs_processes
def test_spec_command(scheduler: Scheduler, role: str) -> None:
    spec = SchedulingSpec(cmd="http.server --bind 127.0.0.1 0")
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[spec]))
    pid = scheduler.call_engine(worker, "pid", "command")
    assert is_running(pid)
    (fork,) = scheduler.fork_workers(f"{role}-fork", role)
    with pytest.raises(errors.EngineNotFoundError):  # A fork does not run the target's command.
        scheduler.call_engine(fork, "pid", "command")
    scheduler.delete_workers(role)
    wait_gone({worker: pid})
