"""Test scripts in AReaL's spelling on processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helmsman.compat.areal import Job, Scheduler, SchedulingSpec
from tests.compat.areal.suite import SchedulerSuite, check_dropped_scheduler, make, post


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    with make("local", tmp_path_factory.mktemp("logs")) as scheduler:
        yield scheduler


class TestLocal(SchedulerSuite):
    def test_guard_children_are_reaped(self, scheduler: Scheduler) -> None:
        """A guard that waits until a grandchild has ended does not wait in vain."""
        spec = SchedulingSpec(cpu=1, cmd="python -m tests.compat.areal.guard")
        scheduler.create_workers(Job("guard", 1, [spec]))
        (guard,) = scheduler.get_workers("guard")
        service = self.start_service(guard, 0)
        address = f"http://{guard.ip}:{guard.worker_ports[0]}"
        post(f"{address}/kill_forked_worker", role="router", worker_index=0)
        psutil.wait_procs([service], timeout=60)
        assert not service.is_running(), "neither running nor a zombie"
        scheduler.delete_workers("guard")


def test_dropped_scheduler_ends_workers(tmp_path: Path) -> None:
    check_dropped_scheduler("local", tmp_path)
