"""Tests that `helmsman replay` runs under pdb, and refuses calls that it cannot repeat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helmsman import Job, LocalScheduler
from helmsman.controller.cli import main
from tests.controller.operator.kept_calls import log_dir, number_of

__all__ = ["log_dir"]
ROOT = Path(__file__).parents[4]


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


def test_replay_nothing_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LocalScheduler(log_dir=tmp_path / "logs", preload=()) as scheduler:
        scheduler.create_workers(Job(role="actor"))
    assert main(["replay", str(tmp_path / "logs")]) == 0
    assert "no call was kept; see scheduler.reporter.keep_calls" in capsys.readouterr().out
