"""Scripts that start a Ray of their own, for tests of its start, its loss and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from ray._private import services

PREPARE = """
import asyncio, contextlib, os, signal, sys, threading, time
import psutil
from helmsman import Job, make_scheduler
from helmsman.api import errors
from helmsman.api.scheduler import Timeouts
from tests.contract.engines import Counter

LIMIT_S = 8.0

def report(*words):
    # Not on stdout: threads of Ray print there, even in the middle of a line.
    with open(os.environ["REPORTS"], "a") as file:
        print(*words, file=file)

def start():
    timeouts = Timeouts(shutdown_s=LIMIT_S)
    scheduler = make_scheduler(
        "ray", address="local", num_cpus=2, preload=None, timeouts=timeouts
    )
    (worker,) = scheduler.create_workers(Job(role="a"))
    asyncio.run(scheduler.create_engine(worker, Counter))
    return scheduler, worker

def core(name):
    from ray._private import worker
    return worker._global_node.all_processes[name][0].process.pid

def cluster():
    from ray._private import worker
    return psutil.Process(os.getpid()).children(recursive=True)
"""


def run(
    script: str, *arguments: str, launcher: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script; its ``stdout`` becomes the lines of its calls of ``report``."""
    command = [*launcher, sys.executable, "-c", PREPARE + script, *arguments]
    with tempfile.NamedTemporaryFile("r") as reports:
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "REPORTS": reports.name}
        environ = os.environ | {"RAY_AUTH_MODE": "disabled"} | paths | environment
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=240,
            env=environ,
            start_new_session=True,
        )
        ended.stdout = reports.read()
    return ended


def reports_of(
    script: str, *arguments: str, launcher: tuple[str, ...] = (), **environment: str
) -> list[str]:
    """Return the lines that a script reports, which must succeed."""
    ended = run(script, *arguments, launcher=launcher, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


INTERRUPTED = """
from helmsman import make_scheduler
import signal, sys, time

def stop(number, frame):
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(77)

signal.signal(signal.SIGTERM, stop)
print("starting", flush=True)
with make_scheduler("ray"):
    time.sleep(30)
"""


def check_interrupted_start(after_s: float) -> None:
    """The handler of a script handles a signal while Ray starts."""
    script = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, start_new_session=True
    )
    assert script.stdout is not None
    script.stdout.readline()
    seen: dict[int, psutil.Process] = {}
    until = time.monotonic() + after_s
    try:
        while time.monotonic() < until:
            seen |= {
                child.pid: child for child in psutil.Process(script.pid).children(recursive=True)
            }
            time.sleep(0.02)
        os.kill(script.pid, signal.SIGTERM)
        assert script.wait(timeout=60) == 77
        _, alive = psutil.wait_procs(seen.values(), timeout=10)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    finally:
        script.kill()


START = """
from ray._private import services
started, start_process = [], services.start_ray_process
def remember(*args, **kwargs):
    started.append(start_process(*args, **kwargs))
    return started[-1]
services.start_ray_process = remember
%s
def attempt(start_s=60.0):
    with make_scheduler("ray", num_cpus=1, timeouts=Timeouts(start_s=start_s)) as scheduler:
        report(scheduler.create_workers(Job(role="one", replicas=1)), os.getpgid(0) == os.getpid())
        living = [each.process.pid for each in started if each.process.poll() is None]
        report(*(os.getpgid(pid) == pid for pid in living))

def fail(start_s=60.0):
    try:
        attempt(start_s)
    except errors.RayStartError as error:
        report(error)

"""
STARTED = ["['one/0'] True", "True True"]
"""Report of an attempt that starts head and raylet, each in a process group of its own."""


def replaced(name: str, folder: Path, script: str) -> str:
    """Return a START in which a shell script replaces a program of Ray.

    The shell script finds the program in $program.
    """
    program = folder / name
    original = getattr(services, f"{name.upper()}_EXECUTABLE")
    lines = ["#!/bin/sh", f"program={original}", f"folder={folder}", script]
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    return START % f"services.{name.upper()}_EXECUTABLE = {str(program)!r}"


LOSS = """
folder, *rounds = sys.argv[1:]
scheduler, worker = start()

def lose(name, closes):
    pid, processes = core(name), cluster()
    failures, begun = [], os.path.join(folder, name)
    def call():
        try:
            scheduler.call_engine(worker, "wait", None, begun, begun + "-never")
        except errors.WorkerFailedError as error:
            failures.append(error)
    caller = threading.Thread(target=call)
    caller.start()
    while not os.path.exists(begun):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    caller.join(10.0)
    report("call failed:", bool(failures), time.monotonic() - killed < 10.0)
    (failure,) = failures
    end = f"{name} (pid {pid}) was ended by SIGKILL (sender unknown)"
    report("names it:", end in str(failure))
    report("log:", os.path.basename(failure.log_path), "worker:", failure.worker_id)
    report("mentions others:", "OOM" in str(failure), "not affected" in str(failure))
    (status,) = scheduler.status()
    report("status:", status.state.name)
    restart = lambda: scheduler.restart_worker(worker)
    for operation in (scheduler.nodes, lambda: scheduler.create_workers(Job(role="b")), restart):
        try:
            operation()
        except errors.ClusterLostError as error:
            names_it = f"{name} (pid {pid})" in str(error)
            report("lost:", error.exit_signal == signal.SIGKILL, names_it)
    if closes:
        began = time.monotonic()
        scheduler.close()
        report("closed in time:", time.monotonic() - began < LIMIT_S)
    _, alive = psutil.wait_procs(processes, timeout=15.0)
    report("left:", [each.name() for each in alive if each.status() != psutil.STATUS_ZOMBIE])

for each in rounds:
    lose(*each.split(":"))
    again, worker = start()
    report("another works:", again.call_engine(worker, "add"))
    scheduler.close()
    report("still works:", again.call_engine(worker, "add"))
    scheduler = again
scheduler.close()
"""

REPORTS = [
    "call failed: True True",
    "names it: True",
    "log: {name}.out worker: a/0",
    "mentions others: False False",
    "status: FAILED",
    *["lost: True True"] * 3,
    "closed in time: True",
    "left: []",
    "another works: 1",
    "still works: 2",
]


def loss_reports(name: str, closes: bool = True) -> list[str]:
    """Return the reports of LOSS for a process of Ray."""
    return [line.format(name=name) for line in REPORTS if closes or "closed" not in line]


STUCK = """
import ray
from helmsman.controller._scheduler.ray import cluster_state
scheduler, worker = start()
gcs = core("gcs_server")
os.kill(gcs, signal.SIGSTOP)
outcomes = []
def look():
    try:
        scheduler.nodes()
    except errors.ClusterLostError:
        outcomes.append("lost")
lookers = [threading.Thread(target=look) for _ in range(2)]
for looker in lookers:
    looker.start()
threads = lambda: sum(thread.name == "helmsman-ray" for thread in threading.enumerate())
while threads() < 2:
    time.sleep(0.01)
os.kill(gcs, signal.SIGKILL)
for looker in lookers:
    looker.join(10.0)
scheduler.close()
report(outcomes, "held by Ray:", threads() >= 2)
time.sleep(float(sys.argv[1]))
report("alive")
"""


def check_unanswered_call(lives_s: int, **environment: str) -> None:
    """A script survives a call to a lost head.

    Ray's own client blocks the thread of such a call for ever, and ends the process once it has
    failed to reconnect.
    """
    lines = reports_of(STUCK, str(lives_s), **environment)  # type: ignore[arg-type]
    assert lines == ["['lost', 'lost'] held by Ray: True", "alive"]
