"""Fault plans: read from text, written back, drawn from a seed; and the drill's order of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from helmsman.api.errors import FaultPlanError, FaultsUnsupportedError
from helmsman.api.faults import Fault
from helmsman.api.scheduler import Job
from helmsman.controller._schedulers.factory import make_scheduler
from helmsman.testing import DropNode, FaultPlan, Hang, Kill, Slow
from tests.controller.fakes import FakeScheduler

TEXT = """
# a comment
kill rollout/3 at step 5
hang rollout/1 at step 7 for 20 s   # and another
slow rollout/2 by 3x at step 3 for 1.5min; drop the node of my/role/0 at step 9
hang a/0 at step 0
slow a/0 by 2.5 at step 10
"""
FAULTS = [
    Kill("rollout/3", at_step=5),
    Hang("rollout/1", at_step=7, seconds=20.0),
    Slow("rollout/2", at_step=3, factor=3.0, seconds=90.0),
    DropNode("my/role/0", at_step=9),
    Hang("a/0", at_step=0),
    Slow("a/0", at_step=10, factor=2.5),
]


def test_text_is_read_in_the_order_of_the_steps() -> None:
    plan = FaultPlan.parse(TEXT)
    assert plan == FaultPlan(FAULTS)  # type: ignore[arg-type]
    assert [fault.at_step for fault in plan.faults] == [0, 3, 5, 7, 9, 10]
    assert FaultPlan.parse(TEXT.splitlines()) == plan
    assert FaultPlan.parse("") == FaultPlan()


def test_a_plan_is_written_as_it_is_read() -> None:
    plan = FaultPlan([*FAULTS, Hang("b/0", at_step=1, seconds=1e-5), Slow("b/0", at_step=1, factor=10 / 3)])  # type: ignore[list-item]
    assert "slow rollout/2 by 3x at step 3 for 90 s" in str(plan)
    assert FaultPlan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        ("kil rollout/3 at step 5", "'kil'", "'kill', 'hang', 'slow' or 'drop'"),
        ("kill", "the end", "a worker's id, 'role/index'"),
        ("kill rollout at step 5", "'rollout'", "a worker's id, 'role/index'"),
        ("kill rollout/x at step 5", "'rollout/x'", "a worker's id, 'role/index'"),
        ("kill rollout/3", "the end", "'at', as in 'at step 5'"),
        ("kill rollout/3 at 5", "'5'", "'step', as in 'at step 5'"),
        ("kill rollout/3 at step five", "'five'", "the number of a step"),
        ("kill rollout/3 at step -1", "'-1'", "the number of a step"),
        pytest.param(f"kill a/3 at step {'9' * 5000}", f"'{'9' * 5000}'", "the number of a step", id="too many digits"),
        ("kill rollout/3 at step 5 for 20 s", "'for 20 s'", "the end"),
        ("hang rollout/3 at step 5 20 s", "'20'", "'for' and a time, as in 'for 20 s', or the end"),
        ("hang rollout/3 at step 5 for long", "'long'", "a time, as in '20 s', '500 ms', '2 min' or '1 h'"),
        ("hang rollout/3 at step 5 for 20", "the end", "a unit of time (ms, s, min or h)"),
        ("hang rollout/3 at step 5 for 0 s", "a number out of range", "seconds is 0"),
        ("slow rollout/3 at step 5", "'at'", "'by' and a factor, as in 'by 3x'"),
        ("slow rollout/3 by much at step 5", "'much'", "a factor, as in '3x'"),
        (
            "slow rollout/3 by 1x at step 5",
            "a number out of range",
            "factor is 1 in a fault of rollout/3; expected more than 1",
        ),
        ("drop node of rollout/3 at step 5", "'node'", "'the', as in 'drop the node of rollout/0'"),
    ],
)
def test_what_cannot_be_read_is_told_exactly(text: str, found: str, expected: str) -> None:
    with pytest.raises(FaultPlanError) as caught:
        FaultPlan.parse(f"kill a/0 at step 1\n{text}; kill a/0 at step 1\n")
    error = caught.value
    assert (error.line, error.text, error.found) == (2, text, found)
    assert expected in error.expected
    assert f"line 2: {text!r}: found {found} where {error.expected} is expected. Write 'kill rollout/3" in str(error)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Kill("rollout", at_step=1), "aimed at 'rollout'; expected a worker's id"),
        (lambda: Kill("rollout/0", at_step=-1), "at step -1; expected 0 or more"),
        (lambda: Hang("rollout/0", at_step=1, seconds=float("nan")), "seconds is nan"),
        (lambda: Hang("rollout/0", at_step=1, seconds=float("inf")), "seconds is inf"),
        (lambda: Slow("rollout/0", at_step=1, factor=1001), "factor is 1001"),
    ],
)
def test_faults_that_make_no_sense_are_refused(make: Callable[[], Fault], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- from a seed --------------------------------------------------------------------------------------------------------


RATES = {"kill": 0.2, "hang": 0.1, "slow": 0.05, "drop": 0.01}
WORKERS = [f"rollout/{index}" for index in range(8)]


def test_the_same_seed_gives_the_same_plan_on_any_machine() -> None:
    plan = FaultPlan.random(7, WORKERS, 500, RATES)
    assert plan == FaultPlan.random(7, WORKERS, 500, RATES)
    assert plan != FaultPlan.random(8, WORKERS, 500, RATES)
    assert FaultPlan.parse(str(plan)) == plan
    assert str(FaultPlan.random(7, WORKERS, 12, RATES)) == GOLDEN, "written here by another run"


GOLDEN = """\
slow rollout/3 by 2.726x at step 1 for 8.842 s
slow rollout/5 by 6.584x at step 4 for 47.051 s
kill rollout/0 at step 6
slow rollout/7 by 3.173x at step 10 for 34.054 s
hang rollout/2 at step 12 for 19.255 s"""


def test_rates_are_chances_of_each_step_and_do_not_change_what_others_draw() -> None:
    plan = FaultPlan.random(1, WORKERS, 10_000, RATES, seconds=(1.0, 2.0), factor=(3.0, 4.0))
    counts = Counter(type(fault) for fault in plan.faults)
    for kind, rate in ((Kill, 0.2), (Hang, 0.1), (Slow, 0.05), (DropNode, 0.01)):
        assert counts[kind] == pytest.approx(10_000 * rate, rel=0.3)
    hit = Counter(fault.worker_id for fault in plan.faults)
    assert set(hit) == set(WORKERS)
    assert max(hit.values()) < 1.3 * min(hit.values())
    assert {fault.at_step for fault in plan.faults} <= set(range(1, 10_001))
    slow = [fault for fault in plan.faults if isinstance(fault, Slow)]
    assert all(3 <= fault.factor <= 4 and fault.seconds is not None and 1 <= fault.seconds <= 2 for fault in slow)
    alone = FaultPlan.random(1, WORKERS, 10_000, {"slow": 0.05}, seconds=(1.0, 2.0), factor=(3.0, 4.0))
    assert list(alone.faults) == slow


@pytest.mark.parametrize(("rates", "workers"), [({"burn": 0.1}, WORKERS), ({"kill": 1.5}, WORKERS), ({"kill": 0.1}, [])])
def test_rates_that_make_no_sense_are_refused(rates: dict[str, float], workers: list[str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        FaultPlan.random(1, workers, 10, rates)


# --- drills -------------------------------------------------------------------------------------------------------------


def _fake(*steps: int) -> tuple[FakeScheduler, FaultPlan]:
    scheduler = FakeScheduler()
    scheduler.create_workers(Job(role="a", replicas=1))
    return scheduler, FaultPlan(Kill("a/0", at_step=step) for step in steps)


def test_each_fault_happens_once_as_the_script_comes_to_it() -> None:
    scheduler, plan = _fake(1, 2, 4, 5, 9)
    drill = plan.begin(scheduler)
    happened = {step: [record.fault.at_step for record in drill.step(step)] for step in (1, 2, 2, 3, 6, 5, 8)}
    assert happened == {1: [1], 2: [], 3: [], 6: [4, 5], 5: [], 8: []}
    assert [fault.at_step for fault in scheduler.injected] == [1, 2, 4, 5]
    assert [(record.step, record.fault.at_step) for record in drill.record] == [(1, 1), (2, 2), (6, 4), (6, 5)]


def test_a_run_that_is_resumed_does_not_suffer_again() -> None:
    scheduler, plan = _fake(1, 2, 4, 5)
    drill = plan.begin(scheduler)
    assert [record.fault.at_step for record in asyncio.run(drill.astep(4))] == [4]
    drill.step(5)
    assert [fault.at_step for fault in scheduler.injected] == [4, 5]


def test_what_is_aimed_at_nobody_says_so_and_does_not_end_the_run() -> None:
    scheduler, _ = _fake()
    drill = FaultPlan.parse("kill b/7 at step 1; kill a/0 at step 1").begin(scheduler)
    missed, hit = drill.step(1)
    assert (missed.injection.done, missed.injection.pid) == (False, None)
    assert "no worker 'b/7'" in str(missed)
    assert "nothing done" in str(missed)
    assert hit.injection.done
    assert str(hit) == "kill a/0 at step 1: a/0 (pid 1 on 127.0.0.1): recorded"
    assert drill.record == [missed, hit]
    assert 0 < missed.at <= hit.at


def test_workers_in_the_scripts_own_process_are_spared() -> None:
    with make_scheduler("inline") as scheduler:
        scheduler.create_workers(Job(role="a"))
        with pytest.raises(FaultsUnsupportedError, match="InlineScheduler has its workers in the script's own process"):
            FaultPlan.parse("kill a/0 at step 1").begin(scheduler)
        with pytest.raises(FaultsUnsupportedError):
            asyncio.run(scheduler.inject(Kill("a/0", at_step=1)))
        assert FaultPlan().begin(scheduler).step(1) == []
