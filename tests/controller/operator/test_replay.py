"""`helmsman replay` repeats a kept call in another process, also under pdb."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helmsman import Job, LocalScheduler
from helmsman.controller._operator.replay import kept_calls
from helmsman.controller.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


class Adder:
    """Adds to a base, which another method sets."""

    def __init__(self, base: int) -> None:
        self.base = base

    def prepare(self, base: int) -> None:
        self.base += base

    def add(self, values: np.ndarray) -> float:
        total = float(values.sum())
        return self.base + total

    async def add_later(self, value: int) -> int:
        return self.base + value


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Of a run that has ended, and has kept calls."""
    folder = tmp_path / "logs"
    with LocalScheduler(log_dir=folder, preload=()) as scheduler:
        scheduler.reporter.keep_calls("actor", "add", most=2)
        scheduler.reporter.keep_calls("other", "add_later")
        scheduler.create_workers([Job(role="actor", replicas=2), Job(role="other")])
        scheduler.create_engines(["actor/0", "actor/1", "other/0"], Adder, None, 1000)
        scheduler.call_engine("actor/1", "prepare", None, 200)
        for number in range(4):
            scheduler.call_engine("actor/1", "add", None, np.full(10_000, number))
        scheduler.call_engine("actor/0", "add", None, scheduler.put(np.ones(3)))
        scheduler.call_engine("other/0", "add_later", None, 5)
    return folder


def number_of(log_dir: Path, worker_id: str) -> int:
    calls = kept_calls(log_dir)
    return max(n for n, call in calls.items() if call.before and call.worker_id == worker_id)


def test_replay_repeats_call(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([each for each in lines if "add on actor/1" in each]) == 2
    for worker_id, result in (("actor/1", "31200.0"), ("other/0", "1005")):
        number = str(number_of(log_dir, worker_id))
        assert main(["replay", str(log_dir), number, "--no-debugger"]) == 0
        assert capsys.readouterr().out == f"{result}\n"


def test_replay_in_debugger(log_dir: Path) -> None:
    command = [sys.executable, "-m", "helmsman", "replay", str(log_dir)]
    done = subprocess.run(
        [*command, str(number_of(log_dir, "actor/1"))],
        input="n\np total, self.base\nc\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "total = float(values.sum())" in done.stdout
    assert "(30000.0, 1200)" in done.stdout
    assert done.stdout.rstrip().endswith("31200.0")


def test_replay_refusals(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log_dir), "999999"]) == 2
    assert "call 999999 was not kept. The run has kept:" in capsys.readouterr().err
    number = str(number_of(log_dir, "actor/0"))
    assert main(["replay", str(log_dir), number, "--no-debugger"]) == 2
    assert "as an argument, whose value ended with the run" in capsys.readouterr().err


def test_kept_calls_are_private(log_dir: Path) -> None:
    folder = log_dir / "calls"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}


def test_replay_nothing_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LocalScheduler(log_dir=tmp_path / "logs", preload=()) as scheduler:
        scheduler.create_workers(Job(role="actor"))
    assert main(["replay", str(tmp_path / "logs")]) == 0
    assert "no call was kept; see scheduler.reporter.keep_calls" in capsys.readouterr().out
