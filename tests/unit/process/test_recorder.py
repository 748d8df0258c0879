"""Test that the flight recorder survives SIGKILL and keeps the newest events."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from helmsman._process.recorder import (
    FILE_BYTES,
    NUM_NAMES,
    NUM_SLOTS,
    SUFFIX,
    Recorder,
    Recording,
    read_recording,
)
from helmsman.api.observer import Kind

RUN = "0123456789"

KILLED = """
import os, signal, sys
from helmsman.api.observer import Kind
from helmsman._process.recorder import Recorder
recorder = Recorder("a/0")
recorder.persist_at(sys.argv[1], "0123456789")
recorder.renew()
name = recorder.name("a/0.step")
for number in range(1000):
    recorder.note(Kind.BEGUN, name, number)
os.kill(os.getpid(), signal.SIGKILL)
"""


def read(folder: Path) -> Recording:
    (path,) = folder.glob(f"*{SUFFIX}")
    found = read_recording(path)
    assert found is not None
    return found


def test_recorder_keeps_events_before_and_after_persist(tmp_path: Path) -> None:
    recorder = Recorder("a/0")
    recorder.note(Kind.STATE, recorder.name("before"))
    recorder.persist_at(str(tmp_path / "a-0"), RUN)
    recorder.renew()
    recorder.note(Kind.WEIGHTS, recorder.name("after"), 7, 0.5)
    recorder.beat()
    found = read(tmp_path)
    assert (found.title, found.pid) == ("a/0", os.getpid())
    assert [(each.kind, each.name, each.number, each.value) for each in found.events] == [
        (Kind.STATE, "before", 0, 0.0),
        (Kind.WEIGHTS, "after", 7, 0.5),
    ]
    assert found.alive_ns >= found.events[-1].at_ns
    recorder.close()
    recorder.note(Kind.STATE, recorder.name("late"))
    assert len(read(tmp_path).events) == 2


def test_recorder_keeps_events_of_killed_process(tmp_path: Path) -> None:
    path = str(tmp_path / "a-0")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, path], env={"PYTHONPATH": sys.path[0]}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert [each.number for each in read(tmp_path).events] == list(range(1000))


def test_recorder_is_bounded_and_keeps_newest(tmp_path: Path) -> None:
    recorder = Recorder("a/0")
    recorder.persist_at(str(tmp_path / "a-0"), RUN)
    recorder.renew()
    name = recorder.name("x")
    for number in range(NUM_SLOTS + 100):
        recorder.note(Kind.STATE, name, number)
    found = [each.number for each in read(tmp_path).events]
    assert found == list(range(100, NUM_SLOTS + 100))
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == FILE_BYTES
    assert path.stat().st_mode & 0o777 == 0o600


def test_recorder_call_has_one_slot(tmp_path: Path) -> None:
    """A call whose slot was overwritten before its end keeps both times."""
    recorder = Recorder("script")
    recorder.persist_at(str(tmp_path / "script"), RUN)
    recorder.renew()
    name, state = recorder.name("a/0 step"), recorder.name("x")
    early = recorder.note(Kind.SENT, name, 1, at=1.0)
    for _ in range(NUM_SLOTS - 3):
        recorder.note(Kind.STATE, state)
    short = recorder.note(Kind.SENT, name, 2, at=2.0)
    recorder.finish(early, 3.0, Kind.SENT, name, 1, 1.0)
    recorder.finish(short, -4.0, Kind.SENT, name, 2, 2.0)
    open_call = recorder.note(Kind.SENT, name, 3, at=5.0)
    assert open_call > NUM_SLOTS
    calls = [e for e in read(tmp_path).events if e.kind is not Kind.STATE]
    assert [(e.at_ns, e.end_ns, e.kind, e.number, e.ok) for e in calls] == [
        (1_000_000_000, 3_000_000_000, Kind.SENT, 1, True),
        (2_000_000_000, 4_000_000_000, Kind.SENT, 2, False),
        (5_000_000_000, None, Kind.SENT, 3, True),
    ]


def test_recorder_names_are_bounded(tmp_path: Path) -> None:
    recorder = Recorder("a/0")
    recorder.persist_at(str(tmp_path / "a-0"), RUN)
    recorder.renew()
    for number in range(NUM_NAMES + 10):
        recorder.note(Kind.STATE, recorder.name(f"name {number}"))
    names = [each.name for each in read(tmp_path).events]
    assert names[0] == "name 0"
    assert names[-1] == "(other)"


def test_recorder_many_threads(tmp_path: Path) -> None:
    recorder = Recorder("a/0")
    recorder.persist_at(str(tmp_path / "a-0"), RUN)
    recorder.renew()

    def work(start: int) -> None:
        for number in range(start, start + 1000):
            recorder.note(Kind.STATE, recorder.name(f"thread {start}"), number)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 8000, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read(tmp_path).events
    assert sorted(each.number for each in events) == list(range(8000))
    assert all(each.name == f"thread {each.number // 1000 * 1000}" for each in events)


def test_read_recording_other_file(tmp_path: Path) -> None:
    path = tmp_path / f"x{SUFFIX}"
    path.write_bytes(b"not a recording")
    assert read_recording(path) is None
    path.write_bytes(os.urandom(FILE_BYTES))
    assert read_recording(path) is None
