"""Test that schedulers can be dropped without close() after the script has shut its Ray down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import gc, threading
import ray
from helmsman import Job, RayScheduler

def drop():
    schedulers.pop()
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "helmsman-dropped":
            thread.join()

ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
schedulers = [RayScheduler(), RayScheduler()]
for scheduler in schedulers:
    scheduler.create_workers(Job(role="a"))
del scheduler
ray.shutdown()
drop()
ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
drop()
"""


@pytest.mark.timeout(240)
def test_scheduler_dropped_after_shutdown_of_ray() -> None:
    """The second scheduler is dropped while another Ray runs; no thread prints a traceback."""
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "PYTHONPATH": str(Path(__file__).parents[4]),
        },
        capture_output=True,
        text=True,
        timeout=200.0,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("its scheduler was dropped without close()") == 2
    assert "Traceback" not in ended.stderr, ended.stderr
