"""Test that `helmsman replay` repeats a kept call in another process."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from helmsman.controller.cli import main
from tests.controller.operator.kept_calls import log_dir, number_of

__all__ = ["log_dir"]


ROOT = Path(__file__).parents[3]


def test_replay_repeats_call(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = log_dir / "calls"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}
    assert main(["replay", str(log_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([each for each in lines if "add on actor/1" in each]) == 2
    for worker_id, result in (("actor/1", "31200.0"), ("other/0", "1005")):
        number = str(number_of(log_dir, worker_id))
        assert main(["replay", str(log_dir), number, "--no-debugger"]) == 0
        assert capsys.readouterr().out == f"{result}\n"
