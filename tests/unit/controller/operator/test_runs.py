"""Tests of finding runs, following logs and reading recordings, without a live run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helmsman.controller._node.run_registry import RunRecord
from helmsman.controller._operator.logs import follow
from helmsman.controller._operator.recordings import read_timeline
from helmsman.controller._operator.runs import FoundRun, first_of_each_script
from helmsman.controller.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "ffff"], "no run 'ffff' of this user on this machine. helmsman runs lists"),
        (["why", "ffff"], "no run 'ffff'"),
        (["logs", "ffff"], "no run 'ffff'"),
        (["trace", "ffff"], "no run 'ffff'"),
        (["stop", "ffff", "--yes"], "no run 'ffff'"),
    ],
)
def test_unknown_run(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_logs_follow_new_lines_and_files(tmp_path: Path) -> None:
    (tmp_path / "driver.log").write_text("2026-01-01 00:00:00,001 INFO begins\n")
    lines = follow(tmp_path, None, 0)
    assert next(lines) == ("script", "2026-01-01 00:00:00,001 INFO begins")
    (tmp_path / "a-0.log").write_text("2026-01-01 00:00:01,000 first\nno time\nunfinished")
    assert [next(lines)[1] for _ in range(2)] == ["2026-01-01 00:00:01,000 first", "no time"]
    with (tmp_path / "a-0.log").open("a") as file:
        file.write(" line\n")
    assert next(lines) == ("a/0", "unfinished line")


def test_runs_of_one_script() -> None:
    """The RewardPool of a recipe has a run of its own."""
    first, pool, other = (
        FoundRun(RunRecord(run_id=str(n), pid=pid, since=n, log_dir=""), is_alive=True)
        for n, pid in enumerate([7, 7, 8])
    )
    assert first_of_each_script([pool, other, first]) == [first, other]


def test_trace_clock_of_another_node(tmp_path: Path) -> None:
    """Calls begin after they were sent, although the worker's monotonic clock differs."""
    code = """
import sys, time
from helmsman.rpc_server._process.recorder import Kind, Recorder
title, kinds, ahead_ns = sys.argv[2], sys.argv[3], int(sys.argv[4])
recorder = Recorder(title)
recorder.persist_at(sys.argv[1], "0123456789")
recorder.renew()
label = recorder.name("a/0 step" if title == "script" else "a/0.step")
kind = Kind.SENT if title == "script" else Kind.BEGUN
for number in range(1, 4):
    base_s = number / 1000 + ahead_ns / 1e9
    early_s, late_s = (0.0, 0.0009) if title == "script" else (0.0003, 0.0005)
    slot = recorder.note(kind, label, number, at=base_s + early_s)
    recorder.finish(slot, base_s + late_s, kind, label, number, base_s + early_s)
"""
    for title, ahead_ns in (("script", 0), ("a/0", 5_000_000_000)):
        path = str(tmp_path / title.replace("/", "-"))
        command = [sys.executable, "-c", code, path, title, "", str(ahead_ns)]
        subprocess.run(command, env={"PYTHONPATH": os.pathsep.join(sys.path)}, check=True)
    timeline = read_timeline(tmp_path)
    assert timeline is not None
    for sent, run in zip(timeline.sent, timeline.run, strict=True):
        assert run.end_ns is not None
        assert sent.end_ns is not None
        assert sent.begin_ns <= run.begin_ns < run.end_ns <= sent.end_ns
