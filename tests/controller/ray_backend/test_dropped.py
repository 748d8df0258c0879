"""A script that shuts its own Ray down, and drops its scheduler afterwards without close()."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import gc, sys, threading
import ray
from helmsman import Job, RayScheduler

ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
scheduler = RayScheduler()
scheduler.create_workers(Job(role="a"))
ray.shutdown()
if sys.argv[1] == "again":
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
del scheduler
gc.collect()
for thread in threading.enumerate():
    if thread.name == "helmsman-dropped":
        thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["end", "again"])
def test_scheduler_dropped_after_shutdown_of_ray(then: str) -> None:
    """With its job, its actors and groups have ended; a thread that raises prints a traceback."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, then],
        env={
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "its scheduler was dropped without close()" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
