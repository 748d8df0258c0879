"""Preemption notices of workers that receive SIGTERM."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, wait_gone, wait_until
from tests.contract.marks import only_local


class Parent(Counter):
    """An engine with a child that is forked without an exec, as by data loaders."""

    def start(self, path: str) -> int | None:
        """Fork the child; return its pid once it runs."""
        self.child = multiprocessing.get_context("fork").Process(target=_live, args=(path,))
        self.child.start()
        while not os.path.exists(path):
            time.sleep(0.005)
        return self.child.pid

    def terminate(self) -> int | None:
        self.child.terminate()
        self.child.join(10)
        return self.child.exitcode


def _live(path: str) -> None:
    Path(path).touch()
    signal.pause()


def _leaving(scheduler: Scheduler, role: str) -> dict[str, Any]:
    for worker in scheduler.get_workers(role, timeout=0):
        asyncio.run(scheduler.check_health(worker.id))
    return {
        id_: leaving
        for id_, leaving in asyncio.run(scheduler.preemption_notices()).items()
        if id_.startswith(f"{role}/")
    }


def test_preemption_notices_empty(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, replicas=2))
    assert _leaving(scheduler, role) == {}


@only_local
def test_sigterm_is_noticed(scheduler: Scheduler, role: str) -> None:
    first, second = scheduler.create_workers(Job(role=role, replicas=2))
    engine = Engine.create(scheduler, first, Counter)
    pid = engine.call("pid")
    os.kill(pid, signal.SIGTERM)
    notice = wait_until(lambda: _leaving(scheduler, role), "the notice is reported")[first]
    assert notice.reason == f"its process {pid} was sent SIGTERM"
    assert 0 < notice.deadline_s <= 25.0
    assert engine.call("add", 1) == 1
    health = {status.worker_id: status.health for status in scheduler.status()}
    assert health[first] is not None
    assert health[first].ends_in_s is not None
    assert health[second] is not None
    assert health[second].ends_in_s is None
    scheduler.restart_worker(first)
    wait_gone({first: pid})
    assert _leaving(scheduler, role) == {}, "the new process has no notice"


@only_local
def test_sigterm_twice_ends_worker(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker, Counter)
    pid = engine.call("pid")
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: _leaving(scheduler, role), "the first signal is noticed")
    os.kill(pid, signal.SIGTERM)
    wait_gone({worker: pid})
    with pytest.raises(errors.WorkerFailedError, match="exited with code 143"):
        engine.call("add", 1)
    assert asyncio.run(scheduler.preemption_notices()) == {}, "an ended worker has no notice"


@only_local
def test_sigterm_ends_forked_child(scheduler: Scheduler, role: str, tmp_path: Path) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker, Parent)
    pid = engine.call("start", str(tmp_path / "child"))
    assert engine.call("terminate") == -signal.SIGTERM
    wait_gone({"child": pid})
