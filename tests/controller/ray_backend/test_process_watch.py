"""The gcs_server or the raylet of an embedded Ray dies: the script is told within seconds, lives, and starts another."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray")

PREPARE = """
import asyncio, os, signal, sys, threading, time
import psutil
from helmsman import Job, make_scheduler
from helmsman.api import errors
from helmsman.api.scheduler import Timeouts
from tests.contract.engines import Counter

LIMIT_S = 8.0

def said(*words):
    # Not on stdout: Ray's own threads print there, also in the middle of a line.
    with open(os.environ["SAID"], "a") as file:
        print(*words, file=file)

def start():
    scheduler = make_scheduler("ray", address="local", num_cpus=2, preload=None, timeouts=Timeouts(shutdown_s=LIMIT_S))
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

LOSS = """
name = sys.argv[1]
scheduler, worker = start()
pid, processes = core(name), cluster()
failures = []
def call():
    try:
        scheduler.call_engine(worker, "wait", None, sys.argv[2], sys.argv[3])
    except errors.WorkerFailedError as error:
        failures.append(error)
caller = threading.Thread(target=call)
caller.start()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
os.kill(pid, signal.SIGKILL)
killed = time.monotonic()
caller.join(10.0)
said("call failed:", bool(failures), time.monotonic() - killed < 10.0)
(failure,) = failures
said("names it:", f"{name} (pid {pid}) was ended by SIGKILL (by whom is not known)" in str(failure))
said("log:", os.path.basename(failure.log_path), "worker:", failure.worker_id)
said("blames others:", "OOM" in str(failure), "unharmed" in str(failure))
(status,) = scheduler.status()
said("status:", status.state.name)
for operation in (scheduler.nodes, lambda: scheduler.create_workers(Job(role="b")), lambda: scheduler.restart_worker(worker)):
    try:
        operation()
    except errors.ClusterLostError as error:
        said("lost:", error.exit_signal == signal.SIGKILL, f"{name} (pid {pid})" in str(error))
if "close" in sys.argv:
    began = time.monotonic()
    scheduler.close()
    said("closed in time:", time.monotonic() - began < LIMIT_S)
_, alive = psutil.wait_procs(processes, timeout=15.0)
said("left:", [each.name() for each in alive if each.status() != psutil.STATUS_ZOMBIE])
again, worker = start()
said("another works:", again.call_engine(worker, "add"))
scheduler.close()
said("still works:", again.call_engine(worker, "add"))
again.close()
"""

OUTCOME = [
    "call failed: True True",
    "names it: True",
    "log: {name}.out worker: a/0",
    "blames others: False False",
    "status: FAILED",
    *["lost: True True"] * 3,
    "closed in time: True",
    "left: []",
    "another works: 1",
    "still works: 2",
]


def _run(script: str, *arguments: str, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script; its ``stdout`` is what it passed to ``said``."""
    command = [*launcher, sys.executable, "-c", PREPARE + script, *arguments]
    with tempfile.NamedTemporaryFile("r") as said:
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "SAID": said.name}
        environ = os.environ | {"RAY_AUTH_MODE": "disabled"} | paths | environment
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ, start_new_session=True)
        ended.stdout = said.read()
    return ended


@pytest.mark.parametrize("closes", ["close", ""])
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_loss_of_a_core_process_fails_workers_and_spares_the_script(name: str, closes: str, tmp_path: Path) -> None:
    """With or without a close in between, another scheduler starts and does not suffer from the end of the first."""
    ended = _run(LOSS, name, str(tmp_path / "started"), str(tmp_path / "never"), closes)
    assert ended.returncode == 0, ended.stderr
    expected = [line.format(name=name) for line in OUTCOME if closes or "closed" not in line]
    assert ended.stdout.splitlines() == expected, ended.stderr


OF_A_SOAK = pytest.mark.skipif("HELMSMAN_SOAK_ROUNDS" not in os.environ, reason="it waits for Ray's own minute: make soak")

STUCK = """
import ray
from helmsman.controller._ray_backend import cluster_state
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
said(outcomes, "held by Ray:", threads() >= 2)
time.sleep(float(sys.argv[1]))
said("alive")
"""


@pytest.mark.parametrize(
    ("environment", "lives_s"),
    [({"RAY_gcs_rpc_server_reconnect_timeout_s": "2"}, 6), pytest.param({}, 70, marks=OF_A_SOAK)],
)
def test_a_call_that_the_dead_head_never_answers_does_not_end_the_script(environment: dict[str, str], lives_s: int) -> None:
    """Ray's own client holds the thread of such a call for ever, and ends the process once it has failed to reconnect."""
    ended = _run(STUCK, str(lives_s), **environment)  # type: ignore[arg-type]
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["['lost', 'lost'] held by Ray: True", "alive"]


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs the right to make a namespace of processes")
def test_loss_of_the_raylet_spares_a_script_below_init(tmp_path: Path) -> None:
    """Ray takes the parent for the raylet, and a parent with pid 1 for its end; so it is in containers and services."""
    launcher = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", '"$@"; exit $?', "init")
    arguments = ("raylet", str(tmp_path / "started"), str(tmp_path / "never"), "close")
    ended = _run("assert os.getppid() == 1\n" + LOSS, *arguments, launcher=launcher)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [line.format(name="raylet") for line in OUTCOME], ended.stderr


ORDERLY = """
from helmsman import initialize
scheduler, worker = start()
scheduler.close()
with initialize(num_cpus=1, preload=None), make_scheduler("ray") as scheduler:
    scheduler.create_workers(Job(role="a"))
said("ended")
"""


def test_close_in_order_is_no_loss() -> None:
    """Of a scheduler that owns its Ray, and of a cluster that a scheduler has used."""
    ended = _run(ORDERLY)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["ended"]
    assert "has ended" not in ended.stderr
