"""A scheduler without references and without close()."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest

from helmsman.compat.areal import Job, SchedulingSpec
from tests.compat.areal.test_schedulers import make


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "ray"])
def test_dropped_scheduler_ends_workers(kind: str, tmp_path: Path) -> None:
    if kind == "ray":
        import ray

        if ray.is_initialized():
            pytest.skip("another test's cluster is in use")
    scheduler = make(kind, tmp_path)
    scheduler.create_workers(Job("dropped", 2, [SchedulingSpec(cpu=1)]))
    processes = [psutil.Process(each.pid) for each in scheduler.helmsman.status()]
    del scheduler
    gc.collect()
    psutil.wait_procs(processes, timeout=60)
    assert not [each for each in processes if each.is_running()]
