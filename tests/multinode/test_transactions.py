"""Tests that the start of several jobs is atomic, and that a waiting job names the holders."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingStrategy, Timeouts
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract import engines
from tests.contract.helpers import wait_until
from tests.multinode.conftest import TIMEOUTS
from tests.multinode.jobs import make_job, placement_groups

pytestmark = pytest.mark.usefixtures("left_as_found")


def _beside(role: str, target: str) -> Job:
    return Job(
        role=role,
        scheduling_strategy=SchedulingStrategy(type="colocation", target=target, fork=True),
    )


def test_create_workers_many_jobs(run: RayScheduler) -> None:
    ids = run.create_workers(
        [
            _beside("rollout", "train"),
            make_job("train", 2, 1, "shared"),
            make_job("reference", 1, 2),
        ]
    )
    assert ids == ["rollout/0", "train/0", "train/1", "reference/0"]
    (rollout,), train = run.get_workers("rollout"), run.get_workers("train")
    assert rollout.devices == [device for worker in train for device in worker.devices]
    run.delete_workers("train")
    with pytest.raises(errors.RoleNotFoundError):
        run.get_workers("rollout")


def test_create_workers_all_or_nothing(run: RayScheduler) -> None:
    failing = make_job("second", 2, 1, env_vars={}, port_count=100_000)
    with pytest.raises(errors.WorkerStartError, match="second"):
        run.create_workers([make_job("first", 2, 1), failing])
    assert run.status() == []
    assert placement_groups() == []
    for wrong in (
        [make_job("new", 1, 1), _beside("lost", "missing")],
        [make_job("train", 1, 1), _beside("one", "two"), _beside("two", "one")],
    ):
        with pytest.raises(errors.RoleNotFoundError):
            run.create_workers(wrong)
        assert run.status() == []
    assert placement_groups() == []


def test_create_workers_names_holders(make_run: Callable[..., RayScheduler]) -> None:
    import ray

    holder, other = make_run(), make_run(timeouts=Timeouts(start_s=0.5))
    holder.create_workers([make_job("trainer", 2, 4)])
    foreign = ray.remote(num_gpus=8, num_cpus=0)(engines.Counter).options(name="foreign").remote()
    ray.get(foreign.add.remote(1))  # type: ignore[attr-defined]
    with pytest.raises(errors.PlacementTimeoutError) as caught:
        other.create_workers([make_job("one", 1, 8), make_job("two", 1, 8)])
    assert caught.value.elapsed_s >= 0.5
    for fact in (
        "'one and two'",
        "requested 16 GPU",
        "free now 4 GPU",
        f"helmsman/{holder.run_id}/trainer/0",
        "(8 GPU)",
        "actor foreign",
        "pid",
        "limit 0.5 s",
        "Timeouts.start_s",
    ):
        assert fact in str(caught.value)
    assert not [name for name in placement_groups() if other.run_id in name], (
        "its groups are removed"
    )
    ray.kill(foreign)  # type: ignore[arg-type]


def test_create_workers_waits(
    make_run: Callable[..., RayScheduler], caplog: pytest.LogCaptureFixture
) -> None:
    holder, other = make_run(), make_run()
    holder.create_workers(make_job("holder", 5, 4))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.create_workers, make_job("waits", 2, 8))
        warnings = wait_until(
            lambda: [record for record in caplog.records if "still waiting" in record.message],
            "it logs a warning",
        )
        for fact in (
            "'waits'",
            f"of at most {TIMEOUTS.start_s:g} s",
            "requested 16 GPU",
            "free now 0 GPU",
            f"{holder.run_id}/holder",
        ):
            assert fact in warnings[0].getMessage()
        holder.delete_workers()
        assert waiting.result(TIMEOUTS.start_s) == ["waits/0", "waits/1"]
