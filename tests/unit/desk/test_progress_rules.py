"""Tests that calls, starts and requests are judged by their progress between two snapshots."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from helmsman._desk.diagnosis import Diagnosis, diagnose_run
from helmsman._desk.texts import status_text, why_text
from helmsman.api.run_state import (
    Frame,
    HangPolicy,
    OpenCall,
    PhaseSnapshot,
    ProcessReport,
    Progress,
    RequestSnapshot,
    RolloutSnapshot,
    RunSnapshot,
    StackTrace,
)
from tests.unit.desk.test_rules import report, run, worker

STEP = Frame("/home/me/train.py", 10, "step", "x = f(x)")
INSIDE = Frame("/home/me/train.py", 20, "f", "return x")
OTHER = Frame("/home/me/data.py", 88, "load", "json.loads(line)")
SENT_S, APART_S = 100.0, 1.0


def looked(
    progress: dict[str, Any],
    *,
    frames: list[Frame],
    thread: str = "engine",
    median_s: float | None = 1.0,
    age_s: float = SENT_S,
    limit_s: float | None = None,
    **fields: Any,
) -> RunSnapshot:
    """Return a snapshot of a worker in a call."""
    call = OpenCall(name="a/0.step", age_s=age_s, median_s=median_s, limit_s=limit_s)
    stack = StackTrace(
        thread=thread,
        frames=frames,
        call="a/0.step",
        running_s=age_s,
        progress=Progress(number=7, **progress),
    )
    return run(
        worker("a/0", world_size=1, calls=[call], report=report(stacks=[stack], **fields)),
        taken_at=101.0,
    )


def diagnosed(
    now: dict[str, Any],
    before: dict[str, Any],
    frames: tuple[list[Frame], list[Frame]] = ([STEP], [STEP]),
    **fields: Any,
) -> Diagnosis:
    """Diagnose a call whose fields ``process`` and ``own`` differ between two snapshots."""
    shots = [
        looked(each.get("own", {}), frames=shown, **each.get("process", {}), **fields)
        for each, shown in zip((now, before), frames, strict=True)
    ]
    return diagnose_run(shots[0], msgspec.structs.replace(shots[1], taken_at=101.0 - APART_S))


COMPUTES = (
    {"own": {"cpu_s": 9.0}, "process": {"cpu_s": 9.0}},
    {"own": {"cpu_s": 8.0}, "process": {"cpu_s": 8.0}},
)
IDLE = {"own": {"cpu_s": 8.0}}, {"own": {"cpu_s": 8.0}}
BESIDE = (
    {"own": {"cpu_s": 8.0}, "process": {"cpu_s": 9.0}},
    {"own": {"cpu_s": 8.0}, "process": {"cpu_s": 8.0}},
)


@pytest.mark.parametrize(
    ("frames", "fields", "is_problem"),
    [
        (([STEP], [STEP]), {}, True),
        (([STEP], [STEP, INSIDE]), {}, True),
        (([STEP, INSIDE], [STEP, OTHER]), {}, False),
        (([STEP], [STEP]), {"age_s": 14.0}, False),
        (([STEP], [STEP]), {"median_s": None}, False),
        (([STEP], [STEP]), {"median_s": 11.0}, False),
    ],
    ids=["same place", "in a helper", "other functions", "recent", "first call", "usually long"],
)
def test_call_that_computes(
    frames: tuple[list[Frame], list[Frame]], fields: dict[str, Any], is_problem: bool
) -> None:
    diagnosis = diagnosed(*COMPUTES, frames, **fields)
    assert diagnosis.is_healthy is not is_problem
    if is_problem:
        (finding,) = diagnosis.problems
        assert finding.rule == "no progress, cause unknown"
        assert "computes at train.py:10 (x = f(x)) and has not ended for 100.0 s" in finding.cause
        assert "its stack: train.py:10 (x = f(x))" in finding.evidence


def test_call_that_waits_beside_a_thread_that_computes() -> None:
    """Threads that compute may work for the first call of a method, not for later ones for ever."""
    assert diagnosed(*BESIDE, median_s=None).is_healthy
    assert not diagnosed(*BESIDE).is_healthy


@pytest.mark.parametrize(
    ("own", "process", "is_problem"),
    [
        ({}, {}, True),
        ({"moved_bytes": 9}, {}, False),
        ({"quiet_s": 0.5}, {}, False),
        ({"quiet_s": 60.0}, {"quiet_s": 0.5, "moved_bytes": 1 << 20}, True),
        ({}, {"quiet_s": 0.5}, False),
        ({}, {"quiet_s": 60.0}, True),
        ({}, {"moved_bytes": 1 << 20}, False),
        ({}, {"moved_bytes": 1 << 10}, True),
        ({}, {"children_bytes": 1 << 10}, False),
    ],
)
def test_call_that_waits(own: dict[str, Any], process: dict[str, Any], is_problem: bool) -> None:
    now, before = IDLE
    later = {"own": {**now["own"], **own}, "process": process}
    diagnosis = diagnosed(later, before, median_s=None)
    assert diagnosis.is_healthy is not is_problem


def test_task_that_was_woken() -> None:
    now, before = {"own": {"num_wakes": 2}}, {"own": {"num_wakes": 1}}
    assert diagnosed(now, before, thread="task", median_s=None).is_healthy
    assert not diagnosed(before, before, thread="task", median_s=None).is_healthy
    sleeps = [Frame("/home/me/train.py", 10, "step", "await asyncio.sleep(0.1)")]
    polls = diagnosed(now, before, (sleeps, sleeps), thread="task", median_s=None)
    assert [each.rule for each in polls.problems] == ["waits: sleep"]


def test_wait_of_unknown_kind_shows_its_system_call() -> None:
    waits = {"own": {"cpu_s": 8.0, "waits_in": "futex"}}
    (finding,) = diagnosed(waits, waits).problems
    assert "waits in futex at train.py:10 (x = f(x))" in finding.cause
    assert "its thread waits in futex" in finding.evidence


def test_blocked_loop_explains_older_tasks() -> None:
    now = diagnosed(*IDLE, thread="loop")
    task = StackTrace(thread="task", frames=[OTHER], call="a/0.older", running_s=500.0)
    shots = [looked({}, frames=[STEP], thread="loop") for _ in range(2)]
    for each in shots:
        assert each.workers[0].report is not None
        each.workers[0].report.stacks.append(task)
    shots[1] = msgspec.structs.replace(shots[1], taken_at=100.0)
    both = diagnose_run(*shots)
    assert [each.cause for each in both.problems] == [each.cause for each in now.problems]


def test_overdue_call_is_a_problem_in_all_texts() -> None:
    """A call that is overdue by the watchdog's policy is one for all commands."""
    later: dict[str, Any] = {"own": {"moved_bytes": 9}}
    assert diagnosed(later, {}, limit_s=101.0).is_healthy
    diagnosis = diagnosed(later, {}, limit_s=60.0)
    (finding,) = diagnosis.problems
    assert finding.rule == "overdue call"
    assert "overdue by the run's HangPolicy from 60.0 s" in finding.cause
    assert "1 problem, causes first" in why_text(diagnosis)
    shown = status_text(looked({}, frames=[STEP]), diagnosis)
    assert "state: 1 problem\n  overdue call: a/0.step on a/0 has run for 100.0 s" in shown


def test_limits_of_policy() -> None:
    policy = HangPolicy(floor_s=2.0, factor=3.0)
    assert [policy.limit_s(each) for each in (None, 0.1, 4.0)] == [30.0, 2.0, 12.0]


def test_overdue_phase() -> None:
    phase = PhaseSnapshot(kind="evaluation", detail="", age_s=70.0, median_s=1.0, limit_s=60.0)
    now = run(worker("a/0"), phases=[phase])
    (finding,) = diagnose_run(now, now).problems
    assert finding.cause == "The phase evaluation has lasted for 70.0 s; the median is 1.0 s."


@pytest.mark.parametrize("name", ["a/0", "script"])
def test_paused_process(name: str) -> None:
    paused = report(pauses_s=[0.9, 0.9, 1.5])
    parts: dict[str, Any] = {"script": paused} if name == "script" else {}
    now = run(worker("a/0", report=report() if parts else paused), **parts)
    (finding,) = diagnose_run(now, now).problems
    assert (finding.rule, finding.subject) == ("process paused", name)
    assert "was stopped 3 times in the last half minute, for 3.3 s in all" in finding.cause


def test_pause_of_a_debugger() -> None:
    now = run(worker("a/0", report=report(pauses_s=[4.0])))
    assert diagnose_run(now, now).is_healthy


@pytest.mark.parametrize(
    ("cpu_s", "moved_bytes", "is_problem"), [(1.0, 5, True), (1.5, 5, False), (1.0, 6, False)]
)
def test_start_that_waits_for_the_forkserver(
    cpu_s: float, moved_bytes: int, is_problem: bool
) -> None:
    def starting(cpu_s: float, moved_bytes: int, taken_at: float) -> RunSnapshot:
        family = Progress(number=9, cpu_s=cpu_s, moved_bytes=moved_bytes)
        script: ProcessReport = report(forkserver=family)
        phase = PhaseSnapshot(kind="create_workers", detail="actor", age_s=20.0)
        return run(script=script, phases=[phase], taken_at=taken_at)

    diagnosis = diagnose_run(starting(cpu_s, moved_bytes, 101.0), starting(1.0, 5, 100.0))
    assert diagnosis.is_healthy is not is_problem
    if is_problem:
        (finding,) = diagnosis.problems
        assert finding.rule == "start stuck"
        assert "The start of actor waits for the forkserver, process 9" in finding.cause


@pytest.mark.parametrize(("overtaken_s", "is_problem"), [(40.0, True), (5.0, False)])
def test_requests_that_starve(overtaken_s: float, is_problem: bool) -> None:
    low = RequestSnapshot(request_id="low", age_s=41.0, instance_id="", overtaken_s=overtaken_s)
    rollout = RolloutSnapshot(
        role="rollout",
        num_queued=1,
        num_in_flight=3,
        num_done=90,
        num_tokens_done=0,
        paused_by=[],
        version=0,
        is_asleep=False,
        instances={"rollout/0": "healthy"},
        median_s=1.0,
        requests=[low],
    )
    now = run(rollouts=[rollout])
    diagnosis = diagnose_run(now, now)
    assert diagnosis.is_healthy is not is_problem
    if is_problem:
        (finding,) = diagnosis.problems
        assert finding.rule == "requests starve"
        assert "low has been queued for 41.0 s" in finding.cause
        assert "came up to 40.0 s later have started before it" in finding.cause
