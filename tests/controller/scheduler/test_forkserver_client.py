"""Tests of the driver's end of the forkserver of local workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from helmsman._process import guardian
from helmsman._wire.messages import WorkerIdentity
from helmsman.api import errors
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.forkserver_client import ForkedWorker, ForkServer
from helmsman.controller._scheduler.local import LocalProcess, LocalScheduler
from helmsman.controller._scheduler.run_registry import make_log_dir
from helmsman.rpc_server._server.channel import abstract_address
from helmsman.rpc_server._server.forkserver import Spawn, Spawned
from tests.contract.engines import Counter
from tests.contract.helpers import stop, wait_gone, wait_until


async def test_forkserver_start_that_fails_leaves_no_descriptor(tmp_path: Path) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Not a directory"):
        await ForkServer.start("0123456789", Path("/dev/null/forkserver.log"), ())
    assert len(os.listdir("/proc/self/fd")) == num_open


def _parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


def test_forkserver_stopped_keeps_causes_of_death(tmp_path: Path) -> None:
    with LocalScheduler(log_dir=tmp_path, preload=()) as scheduler:
        (worker,) = scheduler.create_workers(Job(role="a"))
        asyncio.run(scheduler.create_engine(worker, Counter))
        pid = scheduler.call_engine(worker, "pid")
        forkserver = _parent_of(pid)
        stop(forkserver)
        try:
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(errors.WorkerFailedError, match="was ended by SIGKILL"):
                scheduler.call_engine(worker, "add")
        finally:
            os.kill(forkserver, signal.SIGCONT)


def test_forkserver_lost_ends_families_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop is free meanwhile, since the end of a family may take a second."""
    together = threading.Barrier(2)
    end_family = guardian.end_family

    def end(pid: int, tag: str, *, limit_s: float) -> set[int]:
        together.wait(30.0)
        return end_family(pid, tag, limit_s=limit_s)

    with LocalScheduler(log_dir=tmp_path, preload=()) as scheduler:
        workers = scheduler.create_workers(Job(role="a", replicas=2))
        pids = [int(status.pid or 0) for status in scheduler.status()]
        monkeypatch.setattr(guardian, "end_family", end)
        os.kill(_parent_of(pids[0]), signal.SIGKILL)
        # The kernel ends them once the forkserver is scheduled, which is after kill() returns.
        wait_gone(dict(zip(workers, pids, strict=True)))
        for worker in workers:
            with pytest.raises(errors.WorkerFailedError, match="was ended by SIGKILL"):
                asyncio.run(scheduler.create_engine(worker, Counter))
        wait_until(lambda: together.n_waiting == 0, "both families are ended")
        assert not together.broken
        monkeypatch.undo()
        assert scheduler.create_workers(Job(role="b")) == ["b/0"]


class _Killed:
    """Forkserver of a worker that has ended."""

    def kill(self, worker: ForkedWorker) -> None:
        assert worker.status.done()


async def _end(tag: str, survivor: int) -> None:
    """End a worker whose forkserver has reported one survivor."""
    loop = asyncio.get_running_loop()
    worker = ForkedWorker(4194303, tag, loop.create_future(), loop.create_future())
    worker.status.set_result(0)
    worker.survivors.set_result([survivor])
    await LocalProcess(_Killed(), worker, "", 0).kill()  # type: ignore[arg-type]


def test_local_process_kill_ends_late_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that exits late must not block later attempts to replace its worker."""
    stays = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(3600)"]
    tag = "0123456789/a/0"
    with subprocess.Popen(stays, start_new_session=True) as foreign:
        asyncio.run(_end(tag, foreign.pid))
        assert foreign.poll() is None, "the pid belongs to another process"
        foreign.kill()
    monkeypatch.setenv(guardian.TAG_VARIABLE, tag)
    with subprocess.Popen(stays, start_new_session=True, stdout=subprocess.PIPE) as member:
        assert member.stdout is not None
        assert member.stdout.readline() == b"up\n", "its environment is readable now"
        asyncio.run(_end(tag, member.pid))
        assert member.wait(30.0) == -signal.SIGKILL


async def test_forkserver_spawn_cancelled_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_log_dir(tmp_path, "0123456789")
    server = await ForkServer.start("0123456789", tmp_path / "forkserver.log", ())
    begin = ForkServer._begun
    pids: list[int] = []

    def begin_and_give_up(server: ForkServer, event: Spawned) -> None:
        begin(server, event)
        pids.append(event.pid)
        start.cancel()

    monkeypatch.setattr(ForkServer, "_begun", begin_and_give_up)
    identity = WorkerIdentity(
        run_id="0123456789", worker_id="a/0", role="a", rank=0, log_path=str(tmp_path / "a-0.log")
    )
    start = asyncio.ensure_future(
        server.spawn(Spawn(identity, abstract_address(), b"key", dict(os.environ)))
    )
    with pytest.raises(asyncio.CancelledError):
        await start
    await asyncio.to_thread(wait_gone, {"a/0": pids[0]})
    await server.stop(8.0)
