"""Tests of deleted roles with a dead and a hung worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec, Timeouts
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, stop, wait_gone, wait_until

pytestmark = pytest.mark.usefixtures("left_as_found")


class Recorded(Counter):
    """Records its destruction in a file."""

    def record_in(self, path: str, name: str) -> None:
        """Set the file and the name of the record."""
        self.record = path, name

    def destroy(self) -> None:
        """Append the name to the file."""
        with open(self.record[0], "a") as file:
            file.write(f"{self.record[1]}\n")


def test_delete_workers_dead_and_hung(
    make_run: Callable[..., RayScheduler], tmp_path: Path
) -> None:
    run = make_run(timeouts=Timeouts(start_s=90.0, shutdown_s=4.0))
    spec = SchedulingSpec(cpu=1, gpu=1, node_packing="spread")
    ids = run.create_workers(Job(role="train", replicas=5, tasks=[spec]))
    record = tmp_path / "told"
    engines = [Engine.create(run, worker_id, Recorded) for worker_id in ids]
    pids = {engine.worker_id: engine.call("pid") for engine in engines}
    for engine in engines:
        engine.call("record_in", str(record), engine.worker_id)
    os.kill(pids["train/1"], signal.SIGKILL)
    with pytest.raises(errors.WorkerFailedError, match="SIGKILL"):
        wait_until(lambda: engines[1].call("add") == 0, "it fails")
    stop(pids["train/3"])

    run.delete_workers("train", reverse_order=True)
    wait_gone(pids)
    assert sorted(record.read_text().split()) == ["train/0", "train/2", "train/4"], (
        "the live engines were destroyed"
    )
    run.delete_workers()  # there is nothing left to delete
    with pytest.raises(errors.RoleNotFoundError):
        run.delete_workers("train")
    run.close()
    run.close()
