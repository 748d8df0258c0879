"""Runs with hung and healthy work in processes of their own, and the texts of the commands."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from helmsman._cli import main
from tests.desk.staged_runs import LIMIT_S, end, run_of, start

WORK = Path(__file__).with_name("staged_work.py")


class ExpectedWork(NamedTuple):
    """Parts of the texts of `why` and `status` about a staged run."""

    kind: str
    why: tuple[str, ...]
    status: tuple[str, ...] = ("1 open",)


HELD = "prepare_batch has waited for ", "7 of 8 episodes are finished."
EXPECTED_WORK = [
    ExpectedWork(
        "event",
        ("hung episode: Episode 5 of episode (5)", "awaits Event.wait at staged_work.py:", *HELD),
        ("episodes of episode: 1 open, 7 ended", "prepare_batch has 7 of 8 (", "5 (5) for "),
    ),
    ExpectedWork("lock", ("hung episode", "awaits Lock.acquire at", "(async with mutex:)", *HELD)),
    ExpectedWork("sleep", ("hung episode", "sleeps for 1e+09 s at", "asyncio.sleep(1e9)", *HELD)),
    ExpectedWork("queue", ("hung episode", "awaits Queue.get at", *HELD)),
    ExpectedWork(
        "process", ("hung episode", "awaits Process.wait at", "(await child.wait())", *HELD)
    ),
    ExpectedWork("polling", ("hung episode", "sleeps for 0.1 s at staged_work.py:", *HELD)),
    ExpectedWork(
        "failed_task",
        ("hung episode", "await done.wait()), and its task failed_task.", "RuntimeError('it never"),
    ),
    ExpectedWork("thread", ("hung episode", "runs in thread asyncio_0 at", "peer.recv(1)", *HELD)),
    ExpectedWork("spinning", ("hung episode", "runs in thread asyncio_0 at staged_work", *HELD)),
    ExpectedWork(
        "blocking",
        ("Episode 5", "blocks the event loop of thread helmsman-workflows at", "time.sleep(1e9)"),
        ("episodes of episode: 8 open", "is ready, but its event loop does not run it"),
    ),
    ExpectedWork(
        "reward",
        (
            "hung episode: Episode 3 of rated (1)",
            "awaits RewardPool.async_score at staged_work.py:",
            "rollout_batch has waited for ",
            "evidence: Reward 3 of reward (score(1)) runs on reward/0 and computes at staged_work",
        ),
        ("rewards of reward: 1 open, 3 ended", "runs on reward/0"),
    ),
    ExpectedWork(
        "own_reward",
        (
            "hung reward: Reward 0 of reward (score(1))",
            "runs on reward/0 and waits for a network peer at staged_work.py:",
            "next: Give it a limit: RewardPool(timeout=...)",
        ),
    ),
    ExpectedWork(
        "tool",
        (
            "hung episode",
            "awaits Event.wait at staged_work.py:",
            "evidence: Tool call 0 of ToolLoop (ask({",
        ),
        ("tool calls of ToolLoop: 1 open",),
    ),
    ExpectedWork(
        "outside_agent",
        (
            "hung outside session: Outside session 0 of http://127.0.0.1:",
            "it waits for its agent's next request (0 turns so far)",
            "collect has waited for ",
            "2 of 3 outside sessions are finished",
        ),
        ("outside sessions of http://127.0.0.1:", "collect has 2 of 3 ("),
    ),
    ExpectedWork(
        "no_agents",
        (
            "no work in flight: collect has waited for ",
            "0 of 3 outside sessions are finished, and no outside session is open: no outside",
            "next: Start agents that open sessions at http://127.0.0.1:",
        ),
        ("0 open", "collect has 0 of 3 ("),
    ),
    ExpectedWork(
        "session",
        ("hung session: Session 0 of the script (chat-7)", "awaits Event.wait at staged_work.py:"),
        ("sessions of the script: 1 open", "(chat-7) for "),
    ),
    ExpectedWork(
        "turn",
        ("rollout starved", "it is paused by pause()", "rollout_batch has waited for "),
        ("sessions of the script: 1 open", "awaits AgentSession.complete at staged_work.py:"),
    ),
    ExpectedWork(
        "blocking_source",
        (
            "event loop blocked: prepare_batch has waited for ",
            "it blocks the event loop of thread helmsman-workflows at staged_work.py:",
            "(time.sleep(1e9))",
        ),
        ("prepare_batch has 0 of 8 (", ", blocks the event loop of thread helmsman-workflows at"),
    ),
    ExpectedWork(
        "nothing_admitted",
        (
            "no work in flight: prepare_batch has waited for ",
            "0 of 2 episodes are finished, and no episode is open: Closed admits no more at ",
            "version 0; the last batch was of version 0.",
            "next: Call set_version()",
        ),
        ("0 open, 2 ended", "prepare_batch has 0 of 2 ("),
    ),
]


def command(*arguments: str) -> tuple[int, str]:
    """Run a command of `helmsman`; return its exit code and text."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = main(list(arguments))
    return code, shown.getvalue()


def assert_work_named(kinds: Sequence[str]) -> None:
    """Start a run of each kind, and wait until `why` has the expected problem and no other."""
    pending = {each.kind: each for each in EXPECTED_WORK if each.kind in kinds}
    processes = {kind: start(kind, script=WORK) for kind in kinds}
    try:
        runs = {kind: run_of(process).run_id for kind, process in processes.items()}
        deadline, seen = time.monotonic() + LIMIT_S, dict[str, str]()
        while pending and time.monotonic() < deadline:
            for kind, expected in list(pending.items()):
                code, text = command("why", runs[kind])
                seen[kind] = text
                if code == 1:
                    assert "1 problem, causes first" in text, text
                    assert not [each for each in expected.why if each not in text], text
                    _, text = command("status", runs[kind])
                    assert not [each for each in expected.status if each not in text], text
                    del pending[kind]
        assert not pending, [seen[kind] for kind in pending]
    finally:
        for process in processes.values():
            end(process)


def assert_work_healthy(kinds: Sequence[str], watched_s: float) -> None:
    """Start healthy runs, and watch them for a while."""
    processes = {kind: start(kind, script=WORK) for kind in kinds}
    try:
        runs = {kind: run_of(process).run_id for kind, process in processes.items()}
        deadline = time.monotonic() + watched_s
        while time.monotonic() < deadline:
            for kind, run_id in runs.items():
                code, text = command("why", run_id)
                assert code == 0, (kind, text)
    finally:
        for process in processes.values():
            end(process)
