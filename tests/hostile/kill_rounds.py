"""Rounds that kill a driver or a worker at a random point of start, call, weight sync, delete or
close, with engines whose children hide.

A round is a seed. After each, no call was executed twice, no answered call is missing or wrong, and
nothing of the run is left within 10 s.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helmsman._process import guardian
from tests.contract.helpers import Driver, has_shared_memory
from tests.hostile.victims import NUM_CALLS, NUM_UPDATES

DAY_SEEDS = (1, 5, 7)
"""Rounds on the local scheduler that run by day."""
Play = Callable[..., None]
LEFT_S = 10.0
"""Time after which remains of the run count as left behind."""

_LONGEST_S = {"start": 3.0, "call": 0.3, "weights": 0.3, "delete": 0.3, "close": 1.0}
"""Longest delay from the beginning of a phase to the kill."""

SCRIPT = """
from tests.hostile import victims

tell(phase="start")
scheduler = make(timeouts=victims.TIMEOUTS{options})
victims.Script(scheduler, folder, {hides}, tell).run()
"""


class Plan(NamedTuple):
    """The signal of a round."""

    phase: str
    delay_s: float
    signal: signal.Signals
    worker: str
    """The worker that receives the signal, '' for the driver."""


def plan_of(seed: int, *, has_workers: bool) -> Plan:
    """Draw a round; without worker processes the driver is the target."""
    source = random.Random(seed)
    phase = source.choice(list(_LONGEST_S))
    delay_s = source.uniform(0.0, _LONGEST_S[phase])
    if has_workers and phase != "start" and source.random() < 0.5:
        target = source.choice(
            ["rollout/0", "rollout/1"] + (["train/0", "train/1"] if phase != "close" else [])
        )
        return Plan(phase, delay_s, source.choice([signal.SIGKILL, signal.SIGSTOP]), target)
    return Plan(phase, delay_s, source.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]), "")


class Round:
    """A driver in a folder of its own, and checks after its end."""

    def __init__(self, folder: Path, backend: str, plan: Plan, address: str = "") -> None:
        self.folder, self.plan = folder, plan
        options = f", address={address!r}" if address else ""
        self.driver = Driver(
            folder, backend, SCRIPT.format(options=options, hides=backend != "inline")
        )
        self.run_id = ""
        self.pids: dict[str, int] = {}

    def run(self) -> None:
        """Send the planned signal, and wait for the end of the driver."""
        while (facts := self.driver.facts()).get("phase") != self.plan.phase:
            self._learn(facts)
        self._learn(facts)
        time.sleep(self.plan.delay_s)
        with contextlib.suppress(ProcessLookupError):  # it has exited
            if not self.plan.worker:
                os.kill(self.driver.process.pid, self.plan.signal)
            elif guardian.mark_of(self.pids[self.plan.worker]) == (
                self.run_id,
                self.pids[self.plan.worker],
            ):
                os.kill(self.pids[self.plan.worker], self.plan.signal)
        code = self.driver.wait(limit_s=90.0)
        if self.plan.worker:
            assert code == 0, f"the driver ended with {code}:\n{self.driver.errors()}"

    def _learn(self, facts: dict[str, Any]) -> None:
        self.run_id = facts.get("run_id", self.run_id)
        self.pids = facts.get("pids", self.pids)

    def check_calls(self) -> None:
        """Check that no call is lost, executed twice or wrong."""
        executed = Counter(self._lines("executed"))
        assert not [line for line, number in executed.items() if number > 1], (
            "executed more than once"
        )
        assert not self._lines("wrong")
        outcomes = [line.partition(": ") for line in self._lines("outcomes")]
        assert not [
            name for name, number in Counter(name for name, _, _ in outcomes).items() if number > 1
        ]
        replied = {name for name, _, outcome in outcomes if outcome == "replied"}
        missing = {name for name in replied if name.startswith("call") and name not in executed}
        assert not missing, "answered and not executed"
        if self.plan.worker:
            sent = self._lines("sent")
            assert set(sent) == {name for name, _, _ in outcomes}, "each operation has an outcome"
            assert len(sent) == NUM_CALLS + NUM_UPDATES + 1

    def check_nothing_left(self) -> None:
        """Check that no process, file, shared memory or folder of the run is left."""
        deadline = time.monotonic() + LEFT_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in self._hidden():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left behind {LEFT_S:g} s after the driver's end:\n{self.driver.errors()}"

    def _left(self) -> list[str]:
        members = guardian.run_members(self.run_id) if self.run_id else set()
        found = [f"process {pid} of the run: {_command(pid)}" for pid in members]
        found += [f"hidden process {pid}: {_command(pid)}" for pid in self._hidden()]
        found += [
            f"shared memory {name}" for name in self._lines("memory") if has_shared_memory([name])
        ]
        return found + self.driver.left()

    def _hidden(self) -> list[int]:
        table = guardian.process_table()
        noted = [
            (int(row.split()[0]), int(row.rpartition(")")[2].split()[19]))
            for row in self._lines("pids")
        ]
        return [
            pid
            for pid, started in noted
            if (row := table.get(pid)) and row.started == started and row.state != "Z"
        ]

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")[:120]
        )
    except OSError:
        return "it has exited"


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Play a round, and check its remains and its calls."""
    played: list[Round] = []

    def begin(backend: str, seed: int, address: str = "") -> None:
        plan = plan_of(seed, has_workers=backend != "inline")
        # shown by pytest if the test fails
        print(f"seed {seed} on {backend}{' at a cluster' if address else ''}: {plan}")
        played.append(Round(tmp_path, backend, plan, address))
        played[0].run()
        played[0].check_nothing_left()
        played[0].check_calls()

    yield begin
    for each in played:
        each.driver.close()
