"""Tests of run records and log directories: their locations and retention."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import pytest

from helmsman._cli import main
from helmsman._desk.cleanup import KEPT_RUNS, KEPT_S, leftovers
from helmsman.api.errors import LogDirectoryError
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.inline import InlineScheduler
from helmsman.controller._scheduler.local import LocalScheduler
from helmsman.controller._scheduler.run_registry import (
    RunLock,
    default_log_dir,
    make_log_dir,
    read_runs,
    refused_places,
    user_dir,
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory that replaces /tmp."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def make_logs(run_id: str, age_s: float = 0.0) -> Path:
    """Make the logs of a run that has ended."""
    path = default_log_dir(run_id)
    make_log_dir(path, run_id)
    (path / "a-0.log").write_text("line\n")
    changed = time.time() - age_s
    os.utime(path, (changed, changed))
    return path


# --- places ---------------------------------------------------------------------------------------


def test_log_dir_in_xdg_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, runtime = tmp_path / "state", tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    logs = make_logs("0123456789")
    assert logs == state / "helmsman" / socket.gethostname() / "0123456789"
    assert logs.stat().st_mode & 0o777 == 0o700
    lock = RunLock("0123456789", "Test", logs)
    assert os.listdir(runtime / "helmsman" / "runs") == ["0123456789.json"]
    assert ("0123456789", True) in [(record.run_id, alive) for record, alive in read_runs()]
    assert not user_dir().exists()
    lock.release()
    assert os.listdir(runtime / "helmsman" / "runs") == []


def test_run_lock_that_cannot_be_written(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(fd: int, operation: int) -> NoReturn:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no locks"):
        RunLock("0123456789", "Test", tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert not list(temporary.rglob("*.json"))


@pytest.mark.parametrize("path", ["/dev/null", "/proc/none"])
def test_make_log_dir_at_an_invalid_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", path)
    with LocalScheduler(preload=()) as scheduler, pytest.raises(LogDirectoryError) as caught:
        scheduler.create_workers(Job(role="a"))
    assert f"cannot be kept in {path}/helmsman/" in str(caught.value)
    assert "Set log_dir to a writable directory" in str(caught.value)


@pytest.mark.parametrize("value", ["relative", "/nowhere/at/all", ""])
def test_run_lock_without_a_runtime_directory(
    value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shell with a runtime directory finds the record, which contains no secret."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    monkeypatch.setattr("sys.argv", ["train.py", "--api-key", "hunter2"])
    lock = RunLock("0123456789", "Test", tmp_path)
    assert "hunter2" not in (user_dir() / "runs" / "0123456789.json").read_text()
    assert refused_places() == []
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert ("0123456789", True) in [(record.run_id, alive) for record, alive in read_runs()]
    lock.release()


def test_run_lock_outlives_the_runtime_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ends with the last session of the user; a record that was removed is written again."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    lock = RunLock("0123456789", "Test", tmp_path)
    assert not lock.renew()
    lock.path.unlink()
    assert lock.renew()
    assert runtime in lock.path.parents
    shutil.rmtree(runtime)
    runtime.touch()
    assert lock.renew()
    assert lock.path == user_dir() / "runs" / "0123456789.json"
    assert [(record.run_id, alive) for record, alive in read_runs()] == [("0123456789", True)]
    lock.release()
    assert not lock.renew()
    assert read_runs() == []


# --- retention ------------------------------------------------------------------------------------


def test_old_logs_are_removed_when_a_run_starts() -> None:
    ids = [f"{index:010x}" for index in range(KEPT_RUNS + 3)]
    paths = [make_logs(run_id, age_s=index * 60.0) for index, run_id in enumerate(ids)]
    InlineScheduler().close()
    assert [path.exists() for path in paths] == [True] * KEPT_RUNS + [False] * 3
    for path, age_s in ((paths[0], KEPT_S - 3600.0), (paths[1], KEPT_S + 3600.0)):
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    InlineScheduler().close()
    assert (paths[0].exists(), paths[1].exists()) == (True, False)


def test_old_logs_of_a_live_run_stay() -> None:
    lock = RunLock("0000000001", "Test", default_log_dir("0000000001"))
    logs = make_logs("0000000001", KEPT_S + 3600.0)
    InlineScheduler().close()
    assert logs.exists()
    lock.release()
    assert [left.run_id for left in leftovers(["0000000001"])] == ["0000000001"]
    assert leftovers(["0000000001"], logs=True, alive=["0000000001"]) == [], (
        "the run is alive elsewhere"
    )
    InlineScheduler().close()
    assert not logs.exists()


def test_old_logs_leave_other_files(tmp_path: Path) -> None:
    make_logs("0000000001", KEPT_S + 3600.0)
    notes = user_dir() / "notes"
    notes.mkdir()
    (user_dir() / "0000000002").symlink_to(tmp_path)
    (user_dir() / "0000000003").touch()
    for path in (notes, user_dir() / "0000000003"):
        os.utime(path, (0.0, 0.0))
    InlineScheduler().close()
    assert sorted(os.listdir(user_dir())) == ["0000000002", "0000000003", "notes", "runs"]


def test_clean_reports_and_removes_logs(capsys: pytest.CaptureFixture[str]) -> None:
    old = make_logs("0000000001", KEPT_S + 3600.0)
    new = make_logs("0000000002")
    other = make_logs("0000000003")
    assert main(["clean", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert f"run 0000000001: ended: would be removed\n  logs {old}\n" in output
    assert "0000000002" not in output
    assert old.exists()
    assert main(["clean"]) == 0
    assert f"run 0000000001: ended: removed\n  logs {old}\n" in capsys.readouterr().out
    assert (old.exists(), new.exists()) == (False, True)
    assert main(["clean", "--run", "0000000002"]) == 0
    assert "run 0000000002: nothing of it is here" in capsys.readouterr().out
    assert main(["clean", "--logs", "--run", "0000000002"]) == 0
    assert f"run 0000000002: ended: removed\n  logs {new}\n" in capsys.readouterr().out
    assert (new.exists(), other.exists()) == (False, True)


def test_leftovers_of_a_run_that_starts_meanwhile(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, listdir = "00ff00ff00", os.listdir
    started: list[RunLock] = []

    def start_meanwhile(path: object = ".") -> list[str]:
        if path == "/proc" and not started:
            logs = default_log_dir(run_id)
            started.append(RunLock(run_id, "Test", logs))
            make_log_dir(logs, run_id)
            (temporary / f"helmsman-{run_id}-x1").mkdir()
        return listdir(path)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "listdir", start_meanwhile)
    (left,) = leftovers([run_id], logs=True)
    assert (left.state, left.folders, left.logs) == ("alive", [], [])
    started[0].release()
