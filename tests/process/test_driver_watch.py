"""Tests that the watcher of a forkserver ends only the run that the forkserver leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from helmsman._process import guardian
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.local import LocalScheduler
from tests.contract.helpers import is_running, wait_until


def _own_processes(run_id: str) -> dict[int, int]:
    """Return the parents of the processes of a run that belong to no worker."""
    table = guardian.process_table()
    return {pid: row.parent for pid, row in table.items() if guardian.mark_of(pid) == (run_id, 0)}


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there is no watcher without pidfds")
def test_driver_watch_leaves_next_forkserver(tmp_path: Path) -> None:
    with LocalScheduler(log_dir=tmp_path, preload=()) as scheduler:
        scheduler.create_workers(Job(role="before"))
        found = _own_processes(scheduler.run_id)
        (server,) = (pid for pid, parent in found.items() if parent == os.getpid())
        watcher = psutil.Process(next(pid for pid, parent in found.items() if parent == server))
        watcher.suspend()
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not is_running(server), "the forkserver has ended")
        scheduler.create_workers(Job(role="after"))
        members = guardian.run_members(scheduler.run_id) - {watcher.pid}
        watcher.resume()
        wait_until(lambda: not is_running(watcher.pid), "the watcher has ended", limit_s=20.0)
        assert members <= guardian.run_members(scheduler.run_id)
    wait_until(lambda: not guardian.run_members(scheduler.run_id), "nothing is left")
