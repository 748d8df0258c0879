"""The watcher of a forkserver: it ends the run that the forkserver leaves, and no more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from helmsman.api.scheduler import Job
from helmsman.controller._schedulers.local import LocalScheduler
from helmsman.rpc_server._process import guardian
from helmsman.rpc_server._process.driver_watch import _remove
from tests.contract.helpers import is_running, wait_until


def _own_processes(run_id: str) -> dict[int, int]:
    """Processes of a run that belong to no worker, and their parents."""
    table = guardian.process_table()
    return {pid: row.parent for pid, row in table.items() if guardian.mark_of(pid) == (run_id, 0)}


@pytest.mark.slow
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


def test_remove_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").touch()
    (tmp_path / "run").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="Not a directory"):
        _remove(str(tmp_path / "run"))
    assert (tmp_path / "precious" / "thesis.txt").exists()
