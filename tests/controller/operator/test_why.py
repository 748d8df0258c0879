"""`helmsman why` names the cause of staged hangs, and none in healthy runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from helmsman.controller._diagnosis.diagnosis import Diagnosis, diagnose_run
from helmsman.controller._operator.runs import find_run, take_two
from tests.controller.operator.conftest import Staged, end, run_of, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 120.0


class Expected(NamedTuple):
    """The finding of a fault, and parts of its text."""

    fault: str
    rule: str
    subject: str
    texts: tuple[str, ...]


FAULTS = [
    Expected(
        "sleeps_in_step",
        "rank missing in collective",
        "actor/1",
        ("does not enter all_reduce at staged.py", "it sleeps at staged.py", "1 rank waits"),
    ),
    Expected(
        "asynchronous",
        "rank missing in collective",
        "actor/1",
        ("of group '0 default_pg', gloo:all_reduce", "it sleeps at", "1 rank waits for it"),
    ),
    Expected("uncalled", "rank missing in collective", "actor/1", ("it has no call", "actor/0")),
    Expected(
        "disordered",
        "deadlock of ranks",
        "actor/0",
        ("different collectives", "actor/0 waits in recv at", "actor/1 waits in recv at"),
    ),
    Expected("sleep", "waits: sleep", "actor/1", ("actor/1.sleep", "time.sleep(3600)")),
    Expected("hold_interpreter", "interpreter stuck", "actor/1", ("interpreter lock", "computes")),
    Expected("wait_for_thread", "waits: lock", "actor/1", ("Event().wait()",)),
    Expected("load", "waits: loader", "actor/1", ("waits for a DataLoader", "actor/1.load")),
    Expected("keep_zombie", "waits: file", "actor/1", ("pipe.read(1)", "is a zombie")),
    Expected("stopped", "worker stopped", "actor/1", ("SIGSTOP", "actor/1.compute")),
    Expected("locked", "waits: lock", "actor/1", ("flock", "actor/1.wait_for_lock")),
    Expected("peer", "waits: connection", "actor/1", ("network peer", "peer.recv(1)")),
    Expected("straggler", "straggler", "rollout/", ("1 of 1 requests", "stragglers")),
    Expected("paused", "rollout starved", "rollout", ("paused by pause()", "queued")),
    Expected("sync", "weight sync stuck", "rollout/0-1", ("actor to rollout", "not finished")),
    Expected("placement", "placement pending", "rollout", ("requests 1 GPU", "Ranks")),
    Expected("unbounded_await", "script waits", "script", ("create_future()",)),
    Expected("stuck_reward", "script waits", "script", ("main waits for a network peer",)),
    Expected("stuck_script", "interpreter stuck", "script", ("computes", "interpreter lock")),
    Expected("stopped_script", "script stopped", "script", ("stopped",)),
    Expected("blocked_loop", "event loop blocked", "script", ("staged.py", "time.sleep(3600)")),
    Expected("dead_worker", "worker dead", "actor/1", ("was ended by SIGKILL",)),
]
GROUPS = [FAULTS[start : start + 7] for start in range(0, len(FAULTS), 7)]


def diagnose(run_id: str) -> Diagnosis:
    return diagnose_run(*take_two(find_run(run_id, alive=True)))


@pytest.fixture(scope="module", params=range(len(GROUPS)))
def group(request: pytest.FixtureRequest) -> Iterator[dict[str, Staged]]:
    """A few runs with a fault each, started together."""
    processes = {each.fault: start(each.fault) for each in GROUPS[request.param]}
    try:
        yield {fault: run_of(process) for fault, process in processes.items()}
    finally:
        for process in processes.values():
            end(process)


def test_why_names_worker_and_cause(group: dict[str, Staged]) -> None:
    pending = [each for each in FAULTS if each.fault in group]
    deadline, seen = time.monotonic() + LIMIT_S, {}
    while pending and time.monotonic() < deadline:
        for expected in list(pending):
            diagnosis = seen[expected.fault] = diagnose(group[expected.fault].run_id)
            problems = [each for each in diagnosis.findings if each.is_problem]
            if not problems:
                continue
            first = problems[0]
            text = f"{first.cause} {' '.join(first.evidence)}"
            assert first.rule == expected.rule, (expected.fault, diagnosis)
            assert first.subject.startswith(expected.subject), (expected.fault, diagnosis)
            assert all(each in text for each in expected.texts), (expected.fault, diagnosis)
            assert first.next_step
            assert len(problems) == 1, (expected.fault, diagnosis)
            pending.remove(expected)
    assert not pending, [seen[each.fault] for each in pending]


@pytest.mark.parametrize("run", ["late_rank", "compute"])
def test_why_finds_nothing_in_healthy_run(stage: Callable[[str], Staged], run: str) -> None:
    """A rank that is slow, and a first call that computes for long."""
    staged = stage(run)
    for _ in range(8):
        diagnosis = diagnose(staged.run_id)
        assert diagnosis.is_healthy, diagnosis
        assert "actor" in diagnosis.waits_for
