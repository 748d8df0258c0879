"""Growth, removal and restarts of workers: refusals, and concurrent requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, alias_of


def _ids(scheduler: Scheduler, role: str) -> list[str]:
    return [worker.id for worker in scheduler.get_workers(role)]


def test_scale_refuses(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, replicas=2))
    scheduler.create_workers(alias_of(role, f"{role}-guest", 2))
    specs = [SchedulingSpec(cpu=0), SchedulingSpec(cpu=0)]
    scheduler.create_workers(Job(role=f"{role}-each", replicas=2, tasks=specs))
    for name, replicas, expected in (
        (role, 1, f"{role}-guest use them"),
        (f"{role}-guest", 3, f"these are colocated with '{role}'"),
        (f"{role}-each", 3, "one spec for all of its replicas"),
    ):
        with pytest.raises(errors.InvalidSpecError, match=expected):
            scheduler.scale(name, replicas)
    with pytest.raises(errors.InvalidSpecError, match="replicas is 0"):
        scheduler.scale(role, 0)
    with pytest.raises(errors.RoleNotFoundError, match="missing"):
        scheduler.scale("missing", 2)
    assert scheduler.scale(role, 3) == [f"{role}/2"]


def test_remove_workers_refuses(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, replicas=2, tasks=[SchedulingSpec(cpu=0)]))
    guest = f"{role}-guest"
    with pytest.raises(errors.InvalidSpecError, match="at least one worker to remain"):
        scheduler.remove_workers(role, _ids(scheduler, role))
    with pytest.raises(errors.WorkerNotFoundError, match=f"{role}/7"):
        scheduler.remove_workers(role, [f"{role}/0", f"{role}/7"])
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.remove_workers("missing", ["missing/0"])
    scheduler.create_workers(alias_of(role, guest, 2))
    with pytest.raises(errors.InvalidSpecError, match=f"these are colocated with '{role}'"):
        scheduler.remove_workers(guest, [f"{guest}/0"])
    assert len(scheduler.get_workers(role)) == 2
    scheduler.delete_workers(guest)
    scheduler.remove_workers(role, [f"{role}/0", f"{role}/0"])
    with pytest.raises(errors.WorkerNotFoundError, match=f"{role}/0"):
        scheduler.restart_worker(f"{role}/0")
    with pytest.raises(errors.WorkerNotFoundError, match=f"{role}/0"):
        scheduler.remove_workers(role, [f"{role}/0"])


def test_remove_workers_concurrently(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, replicas=3))
    with ThreadPoolExecutor() as pool:
        removals = [pool.submit(scheduler.remove_workers, role, [f"{role}/1"]) for _ in range(4)]
        outcomes = [removal.exception(30) for removal in removals]
    assert (
        sorted(type(outcome).__name__ for outcome in outcomes)
        == ["NoneType"] + ["WorkerNotFoundError"] * 3
    )
    assert _ids(scheduler, role) == [f"{role}/0", f"{role}/2"]


def test_add_workers_concurrently(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role))
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(scheduler.add_workers, role, 1) for _ in range(4)]
        removed = (
            pool.submit(scheduler.remove_workers, role, [f"{role}/0"])
            if asked[0].result(30)
            else None
        )
        new = [id_ for each in asked for id_ in each.result(30)]
    assert removed is not None
    assert removed.exception(30) is None
    assert sorted(new) == [f"{role}/{index}" for index in range(1, 5)] == _ids(scheduler, role)
    with pytest.raises(errors.InvalidSpecError, match="replicas is "):
        scheduler.add_workers(role, 0)


def test_restart_workers_names_dependents(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role))
    scheduler.create_workers(alias_of(role, f"{role}-sibling", fork=True))
    sibling = Engine.create(scheduler, f"{role}-sibling/0", Counter)
    engine = Engine.create(scheduler, f"{role}/0", Counter)
    scheduler.restart_workers(role)
    with pytest.raises(errors.EngineNotFoundError):
        engine.call("add", 1)
    assert sibling.call("add", 1) == 1
    with pytest.raises(
        errors.InvalidSpecError, match=f"no other role uses; {role}-sibling would end with them"
    ):
        scheduler.restart_workers(role, elsewhere=True)
    scheduler.create_workers(alias_of(role, f"{role}-guest"))
    with pytest.raises(
        errors.InvalidSpecError, match=f"no other role uses; {role}-guest would end with them"
    ):
        scheduler.restart_workers(role)
    with pytest.raises(
        errors.InvalidSpecError,
        match=f"a role with workers of its own; this one uses those of role '{role}'",
    ):
        scheduler.restart_workers(f"{role}-guest")
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.restart_workers(f"{role}-missing")
    assert sibling.call("add", 1) == 2, "a refused restart ends nothing"
