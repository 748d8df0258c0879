"""Runs with staged faults and healthy runs, in processes of their own, and their diagnosis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from helmsman.controller._diagnosis.diagnosis import Diagnosis, diagnose_run
from helmsman.controller._operator.runs import find_run, take_two

STAGED = Path(__file__).with_name("staged.py")
HEALTHY = Path(__file__).with_name("healthy.py")
LIMIT_S = 120.0
DAY_FAULTS = (
    "sleeps_in_step",
    "stopped",
    "wait_for_thread",
    "stuck_reward",
    "straggler",
    "dead_worker",
)
"""Faults whose evidence comes from different mechanisms."""


class Staged(NamedTuple):
    """A started run."""

    run_id: str
    process: subprocess.Popen[str]
    address: str = ""
    """Address of its Ray cluster."""


def start(*arguments: str, script: Path = STAGED) -> subprocess.Popen[str]:
    """Start a run with a fault, or another script."""
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(STAGED.parents[3]), "RAY_AUTH_MODE": "disabled"},
    )


def run_of(process: subprocess.Popen[str]) -> Staged:
    """Wait until a run hangs."""
    assert process.stdout is not None
    address = ""
    for line in process.stdout:
        word, _, value = line.strip().partition(" ")
        if word == "address":
            address = value
        elif word == "run":
            return Staged(value, process, address)
    raise AssertionError(f"{process.args!r} ended with {process.wait()} before it hung")


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def diagnose(run_id: str) -> Diagnosis:
    return diagnose_run(*take_two(find_run(run_id, alive=True)))


class Expected(NamedTuple):
    """The finding of a fault, and parts of its text."""

    fault: str
    rule: str
    subject: str
    texts: tuple[str, ...]


EXPECTED = [
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


def assert_causes_found(faults: Sequence[str]) -> None:
    """Start a run for each fault, and wait until its only finding is the expected one."""
    pending = {each.fault: each for each in EXPECTED if each.fault in faults}
    assert len(pending) == len(faults)
    processes = {fault: start(fault) for fault in faults}
    try:
        runs = {fault: run_of(process).run_id for fault, process in processes.items()}
        deadline, seen = time.monotonic() + LIMIT_S, dict[str, Diagnosis]()
        while pending and time.monotonic() < deadline:
            for fault, expected in list(pending.items()):
                diagnosis = seen[fault] = diagnose(runs[fault])
                problems = [each for each in diagnosis.findings if each.is_problem]
                if problems:
                    assert len(problems) == 1, (fault, diagnosis)
                    text = f"{problems[0].cause} {' '.join(problems[0].evidence)}"
                    assert problems[0].rule == expected.rule, (fault, diagnosis)
                    assert problems[0].subject.startswith(expected.subject), (fault, diagnosis)
                    assert all(each in text for each in expected.texts), (fault, diagnosis)
                    assert problems[0].next_step
                    del pending[fault]
        assert not pending, [seen[fault] for fault in pending]
    finally:
        for process in processes.values():
            end(process)


def assert_no_alarm(kinds: Sequence[str], first_seed: int, watched_s: float) -> None:
    """Start healthy runs of these kinds, and watch them for a while."""
    seeds = range(first_seed, first_seed + len(kinds))
    processes = [
        start(kind, str(seed), script=HEALTHY) for kind, seed in zip(kinds, seeds, strict=True)
    ]
    try:
        runs = [run_of(process).run_id for process in processes]
        deadline = time.monotonic() + watched_s
        while time.monotonic() < deadline:
            for kind, run_id in zip(kinds, runs, strict=True):
                diagnosis = diagnose(run_id)
                assert diagnosis.is_healthy, (kind, diagnosis)
                assert diagnosis.waits_for
    finally:
        for process in processes:
            end(process)
