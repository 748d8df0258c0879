"""Tests of finding runs, following logs and reading recordings, without a live run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helmsman._cli import main
from helmsman._desk.logs import follow, parse_time
from helmsman._desk.recordings import read_timeline
from helmsman._desk.runs import FoundRun, first_of_each_script
from helmsman._process.recorder import FILE_BYTES
from helmsman.controller._scheduler.run_registry import RunRecord


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
from helmsman._process.recorder import Kind, Recorder
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


def _closed_run(folder: Path, *lines: str) -> None:
    log = ("begins: x", "is closed")
    texts = [f"2026-11-27 04:00:0{at},000 INFO run abc {text}" for at, text in enumerate(log)]
    (folder / "driver.log").write_text("\n".join(texts) + "\n")
    (folder / "a-0.log").write_text("\n".join(("2026-11-27 04:00:00,500 a/0 starts", *lines)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-27 04:00:00,500 x", True),
        ("2026-11-27T04:00:00.123456789 x", True),
        ("2026-02-30 10:00:00 x", False),
        ("0000-00-00 00:00:00 x", False),
        ("0001-01-01 00:00:00 x", False),
        ("9999-12-31 23:59:59 x", False),
        ("2026-11-27 25:61:00 x", False),
        ("2026-11-27 ::::::::", False),
        ("\u0662\u0660\u0662\u0666-01-01 00:00:00 x", False),
    ],
)
def test_time_of_a_line(text: str, expected: bool) -> None:
    assert (parse_time(text, latest=4e9) is not None) == expected


def test_times_of_lines_do_not_move_the_end_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _closed_run(tmp_path, "9998-12-31 00:00:00 a licence ends", "2199-01-01 00:00:00 x")
    assert main(["postmortem", str(tmp_path)]) == 0
    assert "The run was closed normally at 2026-11-27 04:00:01" in capsys.readouterr().out


def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _closed_run(tmp_path)
    os.mkfifo(tmp_path / "b-0.log")
    (tmp_path / "c-0.log").mkdir()
    (tmp_path / "a-0.1.events").write_bytes(b"helmsman events 3\0".ljust(FILE_BYTES, b"\0"))
    (tmp_path / "a-0.2.events").write_bytes(b"helmsman events 4\0")
    (tmp_path / "a-0.3.events").write_bytes(b"other")
    (tmp_path / "a-0.4.events").write_bytes(b"helmsman events 4\0".ljust(FILE_BYTES, b"\xff"))
    assert main(["postmortem", str(tmp_path)]) == 0
    written = capsys.readouterr().err
    assert f"b-0.log is left out: {tmp_path}/b-0.log is not used: it is a special file" in written
    assert "c-0.log is left out" in written
    assert "a-0.1.events is left out: a recording of format 3, expected format 4. Use" in written
    assert f"a-0.2.events is left out: a recording of 18 bytes, expected {FILE_BYTES}" in written
    assert "a-0.3.events is left out: a recording of another format, expected" in written
    assert "a-0.4.events is left out: a recording whose header has no possible time" in written


def test_large_log_without_lines_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A progress bar ends its states by carriage returns."""
    _closed_run(tmp_path)
    (tmp_path / "a-0.log").write_bytes(b"50 %\r" * (1 << 20) + b"done")
    assert main(["logs", str(tmp_path), "a/0"]) == 0
    assert capsys.readouterr().out.endswith("50 %\rdone\n")


def test_large_logs_need_little_memory(tmp_path: Path) -> None:
    _closed_run(tmp_path)
    with (tmp_path / "a-0.log").open("r+b") as file:
        file.truncate(20 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n2026-11-27 04:00:00,900 the last line\n")
    (tmp_path / "b-0.log").write_bytes(b"\n" * (1 << 20))
    code = (
        "import sys\n"
        "from helmsman._cli import main\n"
        "code = main(sys.argv[1:])\n"
        "status = open('/proc/self/status').read()\n"
        "print(int(status.split('VmHWM:')[1].split()[0]) >> 10, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "postmortem", tmp_path],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.splitlines()[-1]) < 200, "MiB"
