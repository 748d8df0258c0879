"""The Ray that a scheduler starts for itself goes with a start that is broken off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip("ray")

SCRIPT = """
import signal, sys, time
from helmsman import make_scheduler

def stop(number, frame):
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(77)

signal.signal(signal.SIGTERM, stop)
print("starting", flush=True)
with make_scheduler("ray"):
    time.sleep(30)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.6, 1.5, 2.2])
def test_a_start_that_a_signal_breaks_off_leaves_no_process(after_s: float) -> None:
    """The script's own handler answers, also while Ray starts, when Ray would like to."""
    script = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, start_new_session=True)
    assert script.stdout is not None
    script.stdout.readline()
    seen: dict[int, psutil.Process] = {}
    until = time.monotonic() + after_s
    while time.monotonic() < until:
        seen |= {child.pid: child for child in psutil.Process(script.pid).children(recursive=True)}
        time.sleep(0.02)

    os.kill(script.pid, signal.SIGTERM)

    assert script.wait(timeout=10) == 77
    _, alive = psutil.wait_procs(seen.values(), timeout=3)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
