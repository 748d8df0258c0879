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

from helmsman._desk.diagnosis import Diagnosis
from helmsman._desk.runs import find_run, judge

STAGED = Path(__file__).with_name("staged.py")
HEALTHY = Path(__file__).with_name("healthy.py")
CALLED = STAGED.with_name("staged_calls.py")
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
        env={**os.environ, "PYTHONPATH": str(STAGED.parents[2]), "RAY_AUTH_MODE": "disabled"},
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
    return judge(find_run(run_id, alive=True))[1]


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
    Expected("starved", "requests starve", "rollout", ("has been queued for", "1 were overtaken")),
    Expected("stuck_preload", "start stuck", "actor", ("waits for the forkserver", "preloads")),
    Expected("native_wait", "script waits", "script", ("main waits in futex", "sem_wait(gate)")),
]

UNKNOWN = "no progress, cause unknown"
CALLS = {
    "native_mutex": (UNKNOWN, "waits in futex at staged_calls.py"),
    "native_pause": (UNKNOWN, "pause()"),
    "native_semaphore": (UNKNOWN, "waits in futex at"),
    "waits_for_signal": (UNKNOWN, "waits in rt_sigtimedwait at"),
    "counts_events": (UNKNOWN, "waits in read on anon_inode:[eventfd] at"),
    "meets_at_barrier": ("waits: lock", "meets()"),
    "enters_gate": ("waits: message", "with gate:"),
    "crossed_threads": ("waits: lock", "ThreadPoolExecutor"),
    "empty_box": ("waits: message", "box.get()"),
    "never_set": (UNKNOWN, "asyncio.run(wait())"),
    "sleeps_first": ("waits: sleep", "time.sleep(FOREVER_S)"),
    "looks_for_file": ("waits: sleep", "time.sleep(0.1)"),
    "reads_pipe": (UNKNOWN, "waits in read on pipe:"),
    "opens_fifo": ("waits: file", "os.open(path, os.O_RDONLY)"),
    "locks_file": (UNKNOWN, "waits in fcntl on /"),
    "waits_for_child": (UNKNOWN, "waits in waitid at"),
    "stopped_child": ("waits: process", "is stopped: sleep 3600"),
    "peer_answers_nothing": ("waits: connection", "waits in poll with 127.0.0.1:"),
    "body_ends_early": ("waits: connection", "waits in recvfrom with 127.0.0.1:"),
    "peer_reads_nothing": ("waits: connection", "waits in sendto with 127.0.0.1:"),
    "selects": ("waits: connection", "select.select("),
    "accepts_no_one": ("waits: connection", "accept()"),
    "stream_is_silent": ("waits: connection", "await reader.readexactly(1)"),
    "blocks_loop": ("waits: lock", "Event().wait()"),
    "tries_again": ("waits: sleep", "time.sleep(0.2)"),
    "awaits_event": ("waits: lock", "await asyncio.Event().wait()"),
    "awaits_thread": (UNKNOWN, "await asyncio.to_thread("),
    "gathers_silence": (UNKNOWN, "await asyncio.gather("),
    "writes_full_pipe": ("waits: file", "waits in write on pipe:"),
    "holds_interpreter": ("interpreter stuck", "sleeps in C code that holds the interpreter lock"),
    "returns_what_waits": ("waits: lock", "Event().wait()"),
    "spins": (UNKNOWN, "computes at staged_calls.py"),
    "spins_in_helper": (UNKNOWN, "computes at staged_calls.py"),
    "native_loop": (UNKNOWN, "computes at staged_calls.py"),
    "lock_beside_spin": ("waits: lock", "enter()"),
    "stopped_again_and_again": ("process paused", "stopped and continued again and again"),
}
"""Faulty method of staged_calls.py -> the rule of its finding, and a part of its text."""
DAY_CALLS = (
    "native_mutex",
    "peer_answers_nothing",
    "stream_is_silent",
    "blocks_loop",
    "spins",
    "lock_beside_spin",
    "stopped_again_and_again",
)
HEALTHY_CALLS = (
    "slow_download",
    "slow_download_by_http",
    "bursts",
    "download_in_pool",
    "download_stream",
    "downloads_together",
    "slow_reader",
    "download_in_child",
    "long_first_call",
    "long_native_call",
    "compiles",
    "writes_checkpoint",
    "reads_output",
    "steps",
    "sleeps_as_usual",
    "quick",
)


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
                if problems := diagnosis.problems:
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


def assert_calls_named(names: Sequence[str], scheduler: str = "local") -> None:
    """Start a run with these calls, and wait until the finding of each is the expected one."""
    process, pending = start(scheduler, *names, script=CALLED), set(names)
    try:
        run_id, deadline = run_of(process).run_id, time.monotonic() + LIMIT_S
        while pending and time.monotonic() < deadline:
            diagnosis = diagnose(run_id)
            for each in diagnosis.problems:
                name = each.subject.rpartition("/")[0]
                rule, text = CALLS[name]
                shown = f"{each.cause} {' '.join(each.evidence)}"
                assert each.rule == rule and text in shown, each
                assert each.next_step
                pending.discard(name)
            subjects = [each.subject for each in diagnosis.problems]
            assert len(subjects) == len(set(subjects)), diagnosis
        assert not pending, diagnosis
    finally:
        end(process)


def assert_calls_raise_nothing(
    names: Sequence[str], watched_s: float, scheduler: str = "local"
) -> None:
    """Start a run with these calls, and watch it for a while."""
    process = start(scheduler, *names, script=CALLED)
    try:
        run_id, deadline = run_of(process).run_id, time.monotonic() + watched_s
        while time.monotonic() < deadline:
            diagnosis = diagnose(run_id)
            assert diagnosis.is_healthy, diagnosis
    finally:
        end(process)
