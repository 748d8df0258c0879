"""Runs go on when a cleaner removes their files, or the disk of their logs is full for a time."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman import Job, LocalScheduler
from helmsman._cli import main
from helmsman.controller._scheduler.run_registry import read_runs
from tests.contract.helpers import wait_until

LIMIT_S = 30.0


class Printer:
    def say(self, text: str) -> int:
        print(text)
        return os.getpid()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, with the records and logs of runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


@contextlib.contextmanager
def printing(log_dir: Path | None) -> Iterator[LocalScheduler]:
    with LocalScheduler(log_dir=log_dir, preload=()) as scheduler:
        workers = scheduler.create_workers(Job(role="a"))
        scheduler.create_engines(workers, Printer, "e")
        yield scheduler


def _warnings(caplog: pytest.LogCaptureFixture, run_id: str) -> list[str]:
    texts = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    return [text for text in texts if run_id in text]


def _files(log_dir: Path) -> set[str]:
    parts = (path.name.split(".") for path in log_dir.glob("*"))
    return {f"{name}.{rest[-1]}" for name, *rest in parts}


def test_run_goes_on_when_all_its_temporary_files_are_removed(
    places: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with printing(None) as scheduler:
        log_dir, run_id = scheduler.log_dir, scheduler.run_id
        assert places in log_dir.parents
        before = _files(log_dir)
        for path in places.iterdir():
            shutil.rmtree(path)
        files = before - {"forkserver.log"}
        wait_until(lambda: log_dir.is_dir() and _files(log_dir) >= files, "the files", LIMIT_S)
        wait_until(lambda: [e.run_id for e, lives in read_runs() if lives] == [run_id], "record")
        assert main(["status", run_id[:4]]) == 0
        scheduler.call_engine("a/0", "say", "e", "after the removal")
        assert "after the removal" in (log_dir / "a-0.log").read_text()
        os.kill(scheduler.call_engine("a/0", "say", "e", ""), 9)
        wait_until(lambda: scheduler.status()[0].state.value != "ready", "its death is known")
        scheduler.restart_worker("a/0")
    found = _warnings(caplog, run_id)
    removed = "was removed and begins again. Cleaners of temporary files remove old files"
    assert sum(removed in text for text in found) == 3, found
    assert "is closed" in (log_dir / "driver.log").read_text()
    assert main(["postmortem", str(log_dir)]) in (0, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root mounts file systems")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder: Path) -> Path:
    path = folder / "large"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    return path


def test_run_goes_on_while_the_disk_of_its_logs_is_full(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with printing(small_disk / "logs") as scheduler:
        log_dir, run_id = scheduler.log_dir, scheduler.run_id
        large = _fill(small_disk)
        for number in range(20):
            scheduler.call_engine("a/0", "say", "e", "lost " * 2000)
            logging.getLogger("helmsman").warning("%s: line %d %s", run_id, number, "x" * 4096)
        large.unlink()
        scheduler.call_engine("a/0", "say", "e", "there is room")
        text = (log_dir / "a-0.log").read_text()
        assert "bytes of output are missing here: disk full\nthere is room" in text
    found = [each for each in _warnings(caplog, run_id) if ": line " not in each]
    assert len(found) == 1, found
    assert f"its log {log_dir}/driver.log cannot be written: No space left on device" in found[0]
    text = (log_dir / "driver.log").read_text()
    assert "bytes of output are missing here" in text
    assert text.endswith("is closed\n")


def test_run_that_begins_on_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The flight recorders begin once there is room."""
    log_dir = small_disk / "logs"
    log_dir.mkdir()
    large = _fill(small_disk)
    with printing(log_dir) as scheduler:
        run_id = scheduler.run_id
        scheduler.call_engine("a/0", "say", "e", "lost")
        assert not [path for path in log_dir.glob("*.events") if path.stat().st_size]
        large.unlink()
        wait_until(
            lambda: sum(path.stat().st_size > 0 for path in log_dir.glob("*.events")) == 2,
            "the recorders",
            LIMIT_S,
        )
    found = _warnings(caplog, run_id)
    assert len(found) == 2, found
    assert "its flight recorder in" in found[1]
    assert "No space left on device" in found[1]
    assert "The run goes on without it and tries again" in found[1]


def test_run_with_a_home_that_is_missing(tmp_path: Path) -> None:
    script = (
        "from helmsman import *\n"
        "with LocalScheduler(preload=()) as scheduler:\n"
        "    print(scheduler.create_workers(Job(role='a')), scheduler.log_dir)\n"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, text=True, capture_output=True, check=True
    )
    assert done.stdout.startswith("['a/0'] " + str(tmp_path))
    assert done.stderr == ""
