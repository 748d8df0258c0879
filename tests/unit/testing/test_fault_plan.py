"""Test fault plans, random plans from a seed, and drills that inject them in order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from helmsman.api.errors import FaultsUnsupportedError
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.factory import make_scheduler
from helmsman.testing import Fault, FaultPlan, Hang, Kill
from tests.controller.fakes import FakeScheduler

FAULTS: list[Fault] = [
    Kill("rollout/3", at_step=5),
    Hang("rollout/1", at_step=7, seconds=20.0),
    Kill("my/role/0", at_step=9),
    Hang("a/0", at_step=0),
]


def test_fault_plan_order_and_forms() -> None:
    plan = FaultPlan(FAULTS)
    assert [fault.at_step for fault in plan.faults] == [0, 5, 7, 9]
    assert "hang rollout/1 at step 7 for 20 s\n" in str(plan)
    assert (
        FaultPlan(msgspec.json.decode(msgspec.json.encode(plan.faults), type=list[Fault])) == plan
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Kill("rollout", at_step=1), "aimed at 'rollout'; expected a worker's id"),
        (lambda: Kill("rollout/0", at_step=-1), "at step -1; expected 0 or more"),
        (lambda: Hang("rollout/0", at_step=1, seconds=float("nan")), "seconds is nan"),
        (lambda: Hang("rollout/0", at_step=1, seconds=float("inf")), "seconds is inf"),
        (
            lambda: Hang("rollout/0", at_step=1, seconds=0),
            "seconds is 0 in a fault of rollout/0; expected more than 0",
        ),
        (
            lambda: FaultPlan.random(1, WORKERS, 10, {"burn": 0.1}),
            "rates has 'burn': 0.1; expected",
        ),
        (
            lambda: FaultPlan.random(1, WORKERS, 10, {"kill": 1.5}),
            "rates has 'kill': 1.5; expected",
        ),
        (lambda: FaultPlan.random(1, [], 10, {"kill": 0.1}), "workers is empty; expected"),
    ],
)
def test_fault_plan_refuses_invalid_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- from a seed ----------------------------------------------------------------------------------


RATES = {"kill": 0.2, "hang": 0.1}
WORKERS = [f"rollout/{index}" for index in range(8)]


def test_fault_plan_random_same_for_seed() -> None:
    plan = FaultPlan.random(7, WORKERS, 500, RATES)
    assert plan == FaultPlan.random(7, WORKERS, 500, RATES)
    assert plan != FaultPlan.random(8, WORKERS, 500, RATES)
    assert str(FaultPlan.random(7, WORKERS, 12, RATES)) == GOLDEN


GOLDEN = """\
hang rollout/4 at step 1 for 25.113 s
kill rollout/4 at step 2
hang rollout/6 at step 4 for 20.929 s
kill rollout/0 at step 5
hang rollout/0 at step 6 for 16.328 s
kill rollout/3 at step 10"""


def test_fault_plan_random_rates() -> None:
    plan = FaultPlan.random(1, WORKERS, 10_000, RATES, seconds=(1.0, 2.0))
    counts = Counter(type(fault) for fault in plan.faults)
    for kind, rate in ((Kill, 0.2), (Hang, 0.1)):
        assert counts[kind] == pytest.approx(10_000 * rate, rel=0.3)
    hit = Counter(fault.worker_id for fault in plan.faults)
    assert set(hit) == set(WORKERS)
    assert max(hit.values()) < 1.3 * min(hit.values())
    assert {fault.at_step for fault in plan.faults} <= set(range(1, 10_001))
    hangs = [fault for fault in plan.faults if isinstance(fault, Hang)]
    assert all(fault.seconds is not None and 1 <= fault.seconds <= 2 for fault in hangs)
    alone = FaultPlan.random(1, WORKERS, 10_000, {"hang": 0.1}, seconds=(1.0, 2.0))
    assert list(alone.faults) == hangs


# --- drills ---------------------------------------------------------------------------------------


def kills_at(*steps: int) -> tuple[FakeScheduler, FaultPlan]:
    scheduler = FakeScheduler()
    scheduler.create_workers(Job(role="a", replicas=1))
    return scheduler, FaultPlan(Kill("a/0", at_step=step) for step in steps)


def test_injector_injects_each_fault_once() -> None:
    scheduler, plan = kills_at(1, 2, 4, 5, 9)
    drill = plan.begin(scheduler)
    injected = {
        step: [record.fault.at_step for record in drill.step(step)]
        for step in (1, 2, 2, 3, 6, 5, 8)
    }
    assert injected == {1: [1], 2: [], 3: [], 6: [4, 5], 5: [], 8: []}
    assert [(record.step, record.fault.at_step) for record in drill.record] == [
        (1, 1),
        (2, 2),
        (6, 4),
        (6, 5),
    ]


def test_injector_of_resumed_run() -> None:
    scheduler, plan = kills_at(1, 2, 4, 5)
    drill = plan.begin(scheduler)
    assert [record.fault.at_step for record in asyncio.run(drill.astep(4))] == [4]
    drill.step(5)
    assert [record.fault.at_step for record in drill.record] == [4, 5]


def test_injector_records_missing_worker() -> None:
    scheduler, _ = kills_at()
    drill = FaultPlan([Kill("b/7", at_step=1), Kill("a/0", at_step=1)]).begin(scheduler)
    missed, hit = drill.step(1)
    assert (missed.done, missed.pid) == (False, None)
    assert "no worker 'b/7'" in str(missed)
    assert "nothing done" in str(missed)
    assert hit.done
    assert str(hit) == "kill a/0 at step 1 (pid 1 on 127.0.0.1): killed"
    assert drill.record == [missed, hit]


def test_injector_refuses_inline_workers() -> None:
    with make_scheduler("inline") as scheduler:
        scheduler.create_workers(Job(role="a"))
        with pytest.raises(
            FaultsUnsupportedError,
            match="InlineScheduler runs its workers in the script's process",
        ):
            FaultPlan([Kill("a/0", at_step=1)]).begin(scheduler)
        assert FaultPlan().begin(scheduler).step(1) == []
