"""Roles that use the workers of other roles: calls, environments and deletion."""

from __future__ import annotations

import asyncio

import pytest

from helmsman._base.event_loop import run_sync
from helmsman.api import errors
from helmsman.api.scheduler import Call, Job, Scheduler, Timeouts, WorkerState
from helmsman.controller._groups.call_all import call_all
from tests.contract.engines import Counter, NeverDestroyed
from tests.contract.helpers import Engine, Gate, alias_of, held


def test_call_all_alias_and_target(scheduler: Scheduler, role: str) -> None:
    (target,) = scheduler.create_workers(Job(role=role))
    (alias,) = scheduler.create_workers(alias_of(role, f"{role}-alias"))
    Engine.create(scheduler, target, Counter, "shared")
    calls = {target: Call((1,)), alias: Call((1,))}
    assert run_sync(call_all(scheduler, role, "add", calls, engine_name="shared")) == [1, 2]
    (state,) = {worker.state for worker in scheduler.status() if worker.worker_id == target}
    assert state is WorkerState.READY


@pytest.fixture
def short_shutdown(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "timeouts", Timeouts(shutdown_s=1.0))


@pytest.mark.usefixtures("short_shutdown")
def test_delete_alias_destroy_hangs(scheduler: Scheduler, role: str) -> None:
    (target,) = scheduler.create_workers(Job(role=role))
    (alias,) = scheduler.create_workers(alias_of(role, f"{role}-alias"))
    actor = Engine.create(scheduler, target, Counter)
    Engine.create(scheduler, alias, NeverDestroyed)
    with pytest.raises(errors.ShutdownIncompleteError) as raised:
        scheduler.delete_workers(f"{role}-alias")
    assert raised.value.command == f"scheduler.delete_workers('{role}')"
    (left,) = raised.value.remaining
    assert left.startswith(f"engine(s) {alias} of {alias}, whose destroy has not ended in worker")
    assert f"worker {target} (pid " in left
    assert actor.call("add") == 1, "its thread is free"
    assert scheduler.create_workers(alias_of(role, f"{role}-alias")) == [alias]
    assert Engine.create(scheduler, alias, Counter).call("add") == 1, "the name is free"
    scheduler.delete_workers(role)


@pytest.mark.usefixtures("short_shutdown")
def test_delete_alias_of_busy_target(scheduler: Scheduler, role: str, gate: Gate) -> None:
    (target,) = scheduler.create_workers(Job(role=role))
    (alias,) = scheduler.create_workers(alias_of(role, f"{role}-alias"))
    actor = Engine.create(scheduler, target, Counter)
    Engine.create(scheduler, alias, Counter)
    with (
        held(actor, gate),
        pytest.raises(errors.ShutdownIncompleteError, match=f"engine.s. {alias} of {alias}"),
    ):
        scheduler.delete_workers(f"{role}-alias")
    assert actor.call("add", 0) == 1
    health = asyncio.run(scheduler.check_health(target))
    assert list(health.engines) == [target], "the engine is destroyed after the call"


def test_delete_target_deletes_aliases(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role))
    scheduler.create_workers(alias_of(role, f"{role}-alias"))
    scheduler.create_workers(alias_of(f"{role}-alias", f"{role}-alias-of-alias"))
    scheduler.delete_workers(role)
    for name in (role, f"{role}-alias", f"{role}-alias-of-alias"):
        with pytest.raises(errors.RoleNotFoundError):
            scheduler.get_workers(name)


def test_alias_environment(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    (alias,) = scheduler.create_workers(alias_of(role, f"{role}-alias"))
    asyncio.run(scheduler.set_worker_env(alias, {"CONTRACT_ALIAS": "1"}))
    assert Engine.create(scheduler, worker, Counter).call("environ", "CONTRACT_ALIAS") == {
        "CONTRACT_ALIAS": "1"
    }
