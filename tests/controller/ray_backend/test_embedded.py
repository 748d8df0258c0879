"""The Ray that a scheduler starts for itself: its start, its loss and its end, each in a script of
its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
OF_A_SOAK = pytest.mark.skipif(
    "HELMSMAN_SOAK_ROUNDS" not in os.environ, reason="it takes long: make soak"
)

PREPARE = """
import asyncio, contextlib, os, signal, sys, threading, time
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
    """Run a script; its ``stdout`` is what it passed to ``said``."""
    command = [*launcher, sys.executable, "-c", PREPARE + script, *arguments]
    with tempfile.NamedTemporaryFile("r") as said:
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "SAID": said.name}
        environ = os.environ | {"RAY_AUTH_MODE": "disabled"} | paths | environment
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=240,
            env=environ,
            start_new_session=True,
        )
        ended.stdout = said.read()
    return ended


def told(
    script: str, *arguments: str, launcher: tuple[str, ...] = (), **environment: str
) -> list[str]:
    """What a script that succeeds passed to ``said``."""
    ended = run(script, *arguments, launcher=launcher, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


# --- its start ------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    "after_s", [1.5, *(pytest.param(after_s, marks=OF_A_SOAK) for after_s in (0.6, 2.2))]
)
def test_start_interrupted_by_signal(after_s: float) -> None:
    """The script's own handler answers, also while Ray starts, when Ray would like to."""
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
        said(scheduler.create_workers(Job(role="one", replicas=1)), os.getpgid(0) == os.getpid())
        living = [each.process.pid for each in started if each.process.poll() is None]
        said(*(os.getpgid(pid) == pid for pid in living))

def fail(start_s=60.0):
    try:
        attempt(start_s)
    except errors.RayStartError as error:
        said(error)

"""
STARTED = ["['one/0'] True", "True True"]
"""Head and raylet, each in a process group of its own, and no dashboard."""


def test_start_does_not_run_fork_handlers() -> None:
    """Libraries with threads of their own may crash a forked child, or make it wait for ever."""
    assert told(START % "os.register_at_fork(after_in_child=os.abort)" + "attempt()") == STARTED


def _replaced(name: str, folder: Path, script: str) -> str:
    """A start with a shell script in the place of a program of Ray's, which the script finds in
    $program.
    """
    program = folder / name
    source = f"from ray._private import services as s; print(s.{name.upper()}_EXECUTABLE)"
    lines = ["#!/bin/sh", f"""program="$({sys.executable} -c '{source}')" """]
    program.write_text("\n".join([*lines, f"folder={folder}", script]) + "\n")
    program.chmod(0o755)
    return START % f"services.{name.upper()}_EXECUTABLE = {str(program)!r}"


def test_start_follows_the_limit_of_the_script(tmp_path: Path) -> None:
    """And not that of Ray. A start that takes too long reports the processes that were there."""
    script = (
        _replaced("gcs_server", tmp_path, 'sleep 5; exec "$program" "$@"') + "fail(4.0)\nattempt()"
    )
    lines = told(script, RAY_gcs_server_port_wait_time_s="2")
    assert lines[-2:] == STARTED
    for fact in (
        (
            "no embedded Ray could be started on this machine: TimeoutError: gcs_server has not "
            "published"
        ),
        r"within 4 s \(Timeouts.start_s\)",
        r"Its running processes were ended: .*gcs_server \(pid \d+, sleeping\)",
        r"log: .*/session_\S+/logs",
    ):
        assert re.search(fact, "\n".join(lines)), lines


FAILING = """
echo "$folder" >> "$folder/starts"
for word in "$@"; do case "$word" in --stderr_filepath=*) log="${word#*=}";; esac; done
[ "$(wc -l < "$folder/starts")" -gt 3 ] && exec "$program" "$@"
echo "no space for objects" > "$log"
exit 7
"""


def test_start_is_repeated_once_when_a_process_exits(tmp_path: Path) -> None:
    """At once, with the log of that process: Ray would wait for its raylet half a minute, and print
    the log of its head.
    """
    ended = run(_replaced("raylet", tmp_path, FAILING) + "fail()\nattempt()")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("Ray did not start, trying once more: ChildProcessError: raylet") == 2
    assert len((tmp_path / "starts").read_text().splitlines()) == 4, ended.stderr
    assert re.search(r": ChildProcessError: raylet \(pid \d+\) exited with code 7", ended.stdout)
    assert re.search(
        r"log: \S+/raylet\.err, last 1 lines:\n  \| no space for objects", ended.stdout
    )
    assert ended.stdout.splitlines()[-2:] == STARTED


SESSION = """
import ray
from helmsman import initialize

def session(cluster, end):
    with contextlib.suppress(SystemExit, ValueError), cluster:
        is_scheduler = hasattr(cluster, "create_workers")
        used = contextlib.nullcontext(cluster) if is_scheduler else make_scheduler("ray")
        with used as scheduler:
            scheduler.create_workers(Job(role="one"))
            path = ray._private.worker._global_node.get_session_dir_path()
            end()
    folder = os.path.dirname(path)
    is_in_tmp = folder == os.environ["RAY_TMPDIR"] + "/ray"
    said(is_in_tmp, os.path.isdir(path + "/logs"), len(os.listdir(folder)))

def fail():
    raise ValueError

session(initialize(num_cpus=1, preload=None), lambda: None)
session(make_scheduler("ray", num_cpus=1), lambda: sys.exit(0))
session(make_scheduler("ray", num_cpus=1), fail)
"""


def test_session_is_kept_by_a_failure_alone() -> None:
    """A close in order is reported as no loss, also of a cluster that a scheduler has used."""
    with tempfile.TemporaryDirectory(prefix="he-") as temporary:  # short, for the sockets of Ray
        ended = run(SESSION, TMPDIR=temporary, RAY_TMPDIR=temporary)
        assert ended.stdout.splitlines() == ["True False 0", "True False 0", "True True 2"], (
            ended.stderr
        )
        assert "has ended" not in ended.stderr


# --- its threads ----------------------------------------------------------------------------------

USE = """
def use(scheduler, worker):
    alive = psutil.pid_exists(core("gcs_server")) and psutil.pid_exists(core("raylet"))
    said(alive, scheduler.call_engine(worker, "add"), scheduler.create_workers(Job(role="b")))
    scheduler.close()

"""

THREADS = """
import ray
from helmsman.controller._aio.event_loop import run_sync
from helmsman.controller._ray_backend.embedded import bounded

made = []
thread = threading.Thread(target=lambda: made.append(start()))
thread.start()
thread.join()
shut_down, gate = ray.shutdown, threading.Event()
ray.shutdown = lambda: (gate.wait(), shut_down())
use(*made[0])  # in the end the processes are killed, and the call that shuts Ray down goes on
ray.shutdown = shut_down
threading.Timer(1.0, gate.set).start()

async def in_executor():
    return await asyncio.get_running_loop().run_in_executor(None, start)

use(*asyncio.run(in_executor()))
for late in (
    lambda: ray.put(1),
    lambda: ray.remote(lambda: 1).remote(),
    lambda: ray.util.placement_group([{"CPU": 1}]),
):
    try:
        run_sync(bounded(late))
    except Exception as error:
        said(ray.is_initialized(), "Ray has not been started" in str(error))
"""


def test_ray_outlives_threads_and_late_calls() -> None:
    """Ray's processes end with the thread that started them. A shutdown that takes too long would
    end the Ray that was started meanwhile; and many of Ray's calls start one of their own accord,
    which ends with the thread of the call."""
    assert told(USE + THREADS) == [*["True 1 ['b/0']"] * 2, *["False True"] * 3]


# --- its loss -------------------------------------------------------------------------------------

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
    said("call failed:", bool(failures), time.monotonic() - killed < 10.0)
    (failure,) = failures
    end = f"{name} (pid {pid}) was ended by SIGKILL (sender unknown)"
    said("names it:", end in str(failure))
    said("log:", os.path.basename(failure.log_path), "worker:", failure.worker_id)
    said("blames others:", "OOM" in str(failure), "not affected" in str(failure))
    (status,) = scheduler.status()
    said("status:", status.state.name)
    restart = lambda: scheduler.restart_worker(worker)
    for operation in (scheduler.nodes, lambda: scheduler.create_workers(Job(role="b")), restart):
        try:
            operation()
        except errors.ClusterLostError as error:
            said("lost:", error.exit_signal == signal.SIGKILL, f"{name} (pid {pid})" in str(error))
    if closes:
        began = time.monotonic()
        scheduler.close()
        said("closed in time:", time.monotonic() - began < LIMIT_S)
    _, alive = psutil.wait_procs(processes, timeout=15.0)
    said("left:", [each.name() for each in alive if each.status() != psutil.STATUS_ZOMBIE])

for each in rounds:
    lose(*each.split(":"))
    again, worker = start()
    said("another works:", again.call_engine(worker, "add"))
    scheduler.close()
    said("still works:", again.call_engine(worker, "add"))
    scheduler = again
scheduler.close()
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


def outcome(name: str, closes: bool = True) -> list[str]:
    return [line.format(name=name) for line in OUTCOME if closes or "closed" not in line]


def test_loss_of_a_core_process_spares_the_script(tmp_path: Path) -> None:
    """With or without a close in between, another scheduler starts and does not suffer from the end
    of the first.
    """
    expected = outcome("gcs_server") + outcome("raylet", closes=False)
    assert told(LOSS, str(tmp_path), "gcs_server:close", "raylet:") == expected


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
def test_unanswered_call_does_not_end_the_script(environment: dict[str, str], lives_s: int) -> None:
    """Ray's own client holds the thread of such a call for ever, and ends the process once it has
    failed to reconnect.
    """
    lines = told(STUCK, str(lives_s), **environment)  # type: ignore[arg-type]
    assert lines == ["['lost', 'lost'] held by Ray: True", "alive"]


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux",
    reason="needs the right to make a namespace of processes",
)
def test_loss_of_the_raylet_below_init(tmp_path: Path) -> None:
    """Ray takes the parent for the raylet, and a parent with pid 1 for its end; so it is in
    containers and services.
    """
    launcher = (
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        '"$@"; exit $?',
        "init",
    )
    script = "assert os.getppid() == 1\n" + LOSS
    assert told(script, str(tmp_path), "raylet:close", launcher=launcher) == outcome("raylet")
