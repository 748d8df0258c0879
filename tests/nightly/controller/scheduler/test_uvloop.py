"""Test of a script that installs uvloop before it starts workers, as some libraries do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import asyncio, signal
import psutil, uvloop
uvloop.install()
from helmsman import Job, LocalScheduler
from tests.contract.engines import Counter

async def loop_module():
    return type(asyncio.get_running_loop()).__module__

assert asyncio.run(loop_module()) == "uvloop"
with LocalScheduler(preload=()) as scheduler:
    (worker,) = scheduler.create_workers(Job(role="a"))
    asyncio.run(scheduler.create_engine(worker, Counter))
    print(scheduler.call_engine(worker, "add"))
    forkserver = psutil.Process(scheduler.call_engine(worker, "pid")).parent()
    forkserver.send_signal(signal.SIGKILL)
    forkserver.wait(10.0)
    scheduler.delete_workers("a")
    (worker,) = scheduler.create_workers(Job(role="b"))
    asyncio.run(scheduler.create_engine(worker, Counter))
    print(scheduler.call_engine(worker, "add"))
"""


def test_local_scheduler_under_uvloop(tmp_path: Path) -> None:
    """Transports of uvloop are no asyncio.Transport, and raise when they are closed."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1"]
