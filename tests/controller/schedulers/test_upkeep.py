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
from helmsman.controller._node.run_registry import read_runs
from helmsman.controller.cli import main
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
