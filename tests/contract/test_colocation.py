"""Roles that share others' workers, and sibling processes beside them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import (
    Call,
    Job,
    Scheduler,
    SchedulingSpec,
    SchedulingStrategy,
    WorkerState,
)
from helmsman.controller._aio.event_loop import run_sync
from helmsman.rpc_server._wire.codec import encode
from tests.contract.engines import Counter, NeverDestroyed
from tests.contract.helpers import Engine, is_running, wait_gone, wait_until


def _alias(role: str, target: str, replicas: int, *, fork: bool = False) -> Job:
    return Job(
        role=role,
        replicas=replicas,
        scheduling_strategy=SchedulingStrategy(type="colocation", target=target, fork=fork),
    )


def test_alias_shares_workers(scheduler: Scheduler, role: str) -> None:
    target = scheduler.create_workers(Job(role=role, replicas=2))
    alias = scheduler.create_workers(_alias(f"{role}-alias", role, 2))
    assert alias == [f"{role}-alias/0", f"{role}-alias/1"]
    actor = Engine.create(scheduler, target[1], Counter)
    critic = Engine.create(scheduler, alias[1], Counter)
    assert actor.call("pid") == critic.call("pid")
    assert actor.call("add", 5) == 5
    assert critic.call("add", 7) == 7, "engines are told apart by their names"
    assert scheduler.call_engine(target[1], "add", alias[1], 0) == 7, "whichever worker id is used"
    assert [worker.id for worker in scheduler.get_workers(f"{role}-alias")] == alias
    with pytest.raises(errors.RoleExistsError):
        scheduler.create_workers(_alias(f"{role}-alias", role, 2))

    scheduler.delete_workers(f"{role}-alias")
    assert actor.call("add", 0) == 5, "the target lives on"
    with pytest.raises(errors.EngineNotFoundError):
        scheduler.call_engine(target[1], "add", alias[1])
    with pytest.raises(errors.WorkerNotFoundError):
        critic.call("add")


def test_call_many_alias_and_target(scheduler: Scheduler, role: str) -> None:
    (target,) = scheduler.create_workers(Job(role=role))
    (alias,) = scheduler.create_workers(_alias(f"{role}-alias", role, 1))
    Engine.create(scheduler, target, Counter, "shared")
    call = Call(payload=encode(((1,), {})))

    async def call_both() -> tuple[dict[str, int], dict[str, BaseException]]:
        fanout = scheduler.call_many({target: call, alias: call}, "add", "shared", timeout=60)
        await fanout.wait()
        return dict(fanout.results), dict(fanout.failures)

    assert run_sync(call_both()) == ({target: 1, alias: 2}, {})
    (state,) = {worker.state for worker in scheduler.status() if worker.worker_id == target}
    assert state is WorkerState.READY


def test_delete_alias_destroy_hangs(scheduler: Scheduler, role: str) -> None:
    (target,) = scheduler.create_workers(Job(role=role))
    (alias,) = scheduler.create_workers(_alias(f"{role}-alias", role, 1))
    actor = Engine.create(scheduler, target, Counter)
    Engine.create(scheduler, alias, NeverDestroyed)
    with pytest.raises(errors.ShutdownIncompleteError) as raised:
        scheduler.delete_workers(f"{role}-alias")
    assert raised.value.command == f"scheduler.delete_workers('{role}')"
    (left,) = raised.value.remaining
    assert left.startswith(f"engine(s) {alias} of {alias}, whose destroy has not ended in worker")
    assert f"worker {target} (pid " in left
    assert actor.call("add") == 1, "its thread is free again"
    assert scheduler.create_workers(_alias(f"{role}-alias", role, 1)) == [alias]
    assert Engine.create(scheduler, alias, Counter).call("add") == 1, "the name is free again"
    scheduler.delete_workers(role)


def test_delete_alias_of_busy_target(scheduler: Scheduler, role: str, tmp_path: Path) -> None:
    (target,) = scheduler.create_workers(Job(role=role))
    (alias,) = scheduler.create_workers(_alias(f"{role}-alias", role, 1))
    actor = Engine.create(scheduler, target, Counter)
    Engine.create(scheduler, alias, Counter)
    started, release = tmp_path / "started", tmp_path / "release"
    busy = actor.begin("wait", str(started), str(release))
    wait_until(started.exists, "the target is busy")
    with pytest.raises(errors.ShutdownIncompleteError, match=f"engine.s. {alias} of {alias}"):
        scheduler.delete_workers(f"{role}-alias")
    release.touch()
    assert busy.result() == 1
    assert actor.call("add", 0) == 1
    health = asyncio.run(scheduler.check_health(target))
    assert list(health.engines) == [target], "the engine was destroyed in its turn"


def test_delete_target_deletes_aliases(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role))
    scheduler.create_workers(_alias(f"{role}-alias", role, 1))
    scheduler.create_workers(_alias(f"{role}-alias-of-alias", f"{role}-alias", 1))
    scheduler.delete_workers(role)
    for name in (role, f"{role}-alias", f"{role}-alias-of-alias"):
        with pytest.raises(errors.RoleNotFoundError):
            scheduler.get_workers(name)


def test_alias_of_unequal_size(scheduler: Scheduler, role: str) -> None:
    target = scheduler.create_workers(Job(role=role, replicas=4))
    alias = scheduler.create_workers(_alias(f"{role}-half", role, 2))
    engines = [Engine.create(scheduler, worker, Counter) for worker in (*target, *alias)]
    pids = [engine.call("pid") for engine in engines]
    assert pids[4:] == [pids[0], pids[2]]


@pytest.mark.not_on("inline", "one process, which has no siblings")
def test_fork_dies_alone(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(cpu=0, gpu=2)]))
    (sibling,) = scheduler.create_workers(_alias(f"{role}-forked", role, 1, fork=True))
    one, two = (Engine.create(scheduler, each, Counter) for each in (worker, sibling))
    pids = {"worker": one.call("pid"), "sibling": two.call("pid")}
    assert pids["worker"] != pids["sibling"]
    masks = [
        engine.call("environ", "CUDA_VISIBLE_DEVICES")["CUDA_VISIBLE_DEVICES"]
        for engine in (one, two)
    ]
    assert masks[0] == masks[1], "on the same devices"
    assert len(masks[0].split(",")) == 2
    os.kill(pids["sibling"], signal.SIGKILL)
    with pytest.raises(errors.WorkerFailedError):
        wait_until(lambda: two.call("add") == 0, "it fails")
    assert one.call("add") == 1
    scheduler.delete_workers(f"{role}-forked")
    assert one.call("add") == 2


@pytest.mark.not_on("inline", "one process, which has no siblings")
def test_delete_target_ends_forks(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    (sibling,) = scheduler.fork_workers(f"{role}-forked", role)
    assert sibling == f"{role}-forked/0"
    pids = {each: Engine.create(scheduler, each, Counter).call("pid") for each in (worker, sibling)}
    scheduler.delete_workers(role)
    wait_gone(pids)
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.get_workers(f"{role}-forked")


@pytest.mark.not_on("inline", "one process, which has no siblings")
def test_fork_workers_command(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, replicas=2))
    ids = scheduler.fork_workers(f"{role}-server", role, command="http.server --bind 127.0.0.1 0")
    assert ids == [f"{role}-server/0", f"{role}-server/1"]
    pids = {worker: scheduler.call_engine(worker, "pid", "command") for worker in ids}
    assert all(is_running(pid) for pid in pids.values())
    assert {scheduler.call_engine(worker, "poll", "command") for worker in ids} == {None}
    assert Engine.create(scheduler, ids[0], Counter).call("add") == 1, "the default name is free"
    os.kill(pids[ids[0]], signal.SIGKILL)
    wait_until(lambda: scheduler.call_engine(ids[0], "poll", "command") == -9, "its end is seen")
    failed = [asyncio.run(scheduler.check_health(worker)).failed_engines for worker in ids]
    assert "http.server" in failed[0]["command"]
    assert failed[0]["command"].endswith("has ended with signal 9")
    assert failed[1] == {}
    scheduler.delete_workers(f"{role}-server")
    wait_gone(pids)
    assert len(scheduler.get_workers(role)) == 2


@pytest.mark.not_on("inline", "one process, which has no siblings")
def test_spec_command(scheduler: Scheduler, role: str) -> None:
    spec = SchedulingSpec(cmd="http.server --bind 127.0.0.1 0")
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[spec]))
    pid = scheduler.call_engine(worker, "pid", "command")
    assert is_running(pid)
    (fork,) = scheduler.fork_workers(f"{role}-fork", role)
    with pytest.raises(errors.EngineNotFoundError):  # the target's command is its own
        scheduler.call_engine(fork, "pid", "command")
    scheduler.delete_workers(role)
    wait_gone({worker: pid})


def test_alias_environment(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    (alias,) = scheduler.create_workers(_alias(f"{role}-alias", role, 1))
    asyncio.run(scheduler.set_worker_env(alias, {"CONTRACT_ALIAS": "1"}))
    assert Engine.create(scheduler, worker, Counter).call("environ", "CONTRACT_ALIAS") == {
        "CONTRACT_ALIAS": "1"
    }
