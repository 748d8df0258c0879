"""The Ray that a scheduler starts for itself goes with a start that is broken off."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def _gcs_that(folder: Path, *, fails: int, how: str) -> str:
    """A program in place of Ray's head: the first ``fails`` of its starts do ``how`` (shell), the others are the real one."""
    from ray._private import services

    program = folder / "gcs_server"
    program.write_text(
        f"#!/bin/sh\necho x >> {folder}/starts\n"
        f"if [ $(wc -l < {folder}/starts) -le {fails} ]; then {how}; fi\n"
        f'exec {services.GCS_SERVER_EXECUTABLE} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


START = """
import logging, sys
from ray._private import services
services.GCS_SERVER_EXECUTABLE = sys.argv[1]
from helmsman import Job, make_scheduler
logging.basicConfig()
with make_scheduler("ray", num_cpus=1) as scheduler:
    print(scheduler.create_workers(Job(role="one", replicas=1)))
"""


def _start(program: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"RAY_gcs_server_port_wait_time_s": "3", "RAY_AUTH_MODE": "disabled"}
    return subprocess.run([sys.executable, "-c", START, program], capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize("how", ["exit 3", "sleep 60"])
def test_a_head_that_fails_once_is_started_again(tmp_path: Path, how: str) -> None:
    ended = _start(_gcs_that(tmp_path, fails=1, how=how))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "['one/0']"
    assert "Timed out waiting for file" in ended.stderr
    assert "It is tried once more." in ended.stderr


def test_a_head_that_never_starts_is_told_with_what_was_there(tmp_path: Path) -> None:
    ended = _start(_gcs_that(tmp_path, fails=9, how="sleep 60"))
    assert ended.returncode != 0
    said = ended.stderr
    assert "RayStartError: no Ray of its own could be started on this machine (tries: 2): RuntimeError: Timed out" in said
    assert re.search(r"these of its processes were there: .*gcs_server \(pid \d+, sleeping\)", said)
    assert re.search(r"log: .*/session_\S+/logs", said)
    assert (tmp_path / "starts").read_text().count("x") == 2
