"""The Ray that a scheduler starts for itself: its start, its loss and its end, each in a script of its own."""

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


def run(script: str, *arguments: str, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script; its ``stdout`` is what it passed to ``said``."""
    command = [*launcher, sys.executable, "-c", PREPARE + script, *arguments]
    with tempfile.NamedTemporaryFile("r") as said:
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "SAID": said.name}
        environ = os.environ | {"RAY_AUTH_MODE": "disabled"} | paths | environment
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ, start_new_session=True)
        ended.stdout = said.read()
    return ended


def told(script: str, *arguments: str, launcher: tuple[str, ...] = (), **environment: str) -> list[str]:
    """What a script that succeeds passed to ``said``."""
    ended = run(script, *arguments, launcher=launcher, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


# --- its start ----------------------------------------------------------------------------------------------------------

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


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.6, 1.5, 2.2])
def test_a_start_that_a_signal_breaks_off_leaves_no_process(after_s: float) -> None:
    """The script's own handler answers, also while Ray starts, when Ray would like to."""
    script = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, start_new_session=True)
    assert script.stdout is not None
    script.stdout.readline()
    seen: dict[int, psutil.Process] = {}
    until = time.monotonic() + after_s
    try:
        while time.monotonic() < until:
            seen |= {child.pid: child for child in psutil.Process(script.pid).children(recursive=True)}
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
with make_scheduler("ray", num_cpus=1, timeouts=Timeouts(start_s=float(os.environ.get("START_S", "60")))) as scheduler:
    said(scheduler.create_workers(Job(role="one", replicas=1)), os.getpgid(0) == os.getpid())
    living = [each.process.pid for each in started if each.process.poll() is None]
    said(*(os.getpgid(pid) == pid for pid in living))
"""


@pytest.mark.parametrize("handler", ["os.abort", "lambda: os.read(os.pipe()[0], 1)"])
def test_a_script_that_cannot_be_forked_starts_a_cluster(handler: str) -> None:
    """What libraries with threads of their own do in a forked child may crash it, or wait for ever."""
    lines = told(START % f"os.register_at_fork(after_in_child={handler})")
    assert lines == ["['one/0'] True", "True True"], "head and raylet, each in a process group of its own, and no dashboard"


def _replaced(name: str, folder: Path, script: str) -> str:
    """A start with a shell script in the place of a program of Ray's, which the script finds in $program."""
    program = folder / name
    lines = [
        "#!/bin/sh",
        f"""program="$({sys.executable} -c 'from ray._private import services as s; print(s.{name.upper()}_EXECUTABLE)')" """,
    ]
    program.write_text("\n".join([*lines, f"folder={folder}", script]) + "\n")
    program.chmod(0o755)
    return START % f"services.{name.upper()}_EXECUTABLE = {str(program)!r}"


def test_a_start_that_takes_too_long_tells_what_was_there_and_the_limit(tmp_path: Path) -> None:
    ended = run(_replaced("gcs_server", tmp_path, "sleep 120"), START_S="4")
    assert ended.returncode != 0
    for fact in (
        "RayStartError: no Ray of its own could be started on this machine: TimeoutError: gcs_server has not published",
        r"within 4 s \(Timeouts.start_s\)",
        r"these of its processes were there: .*gcs_server \(pid \d+, sleeping\)",
        r"log: .*/session_\S+/logs",
    ):
        assert re.search(fact, ended.stderr), ended.stderr


def test_a_start_is_given_the_limit_of_the_script_and_not_that_of_ray(tmp_path: Path) -> None:
    assert told(_replaced("gcs_server", tmp_path, 'sleep 5; exec "$program" "$@"'), RAY_gcs_server_port_wait_time_s="2")


FAILING = """
echo "$folder" >> "$folder/starts"
for word in "$@"; do case "$word" in --stderr_filepath=*) log="${word#*=}";; esac; done
[ "$(wc -l < "$folder/starts")" -gt %d ] && exec "$program" "$@"
echo "no space for objects" > "$log"
exit 7
"""


@pytest.mark.parametrize("num_failures", [1, 9])
def test_a_process_that_exits_is_told_at_once_with_its_own_log_and_started_once_more(num_failures: int, tmp_path: Path) -> None:
    """Ray would wait for its raylet half a minute, and say what its head has logged."""
    ended = run(_replaced("raylet", tmp_path, FAILING % num_failures))
    assert "Ray did not start and is started once more: ChildProcessError: raylet" in ended.stderr
    assert len((tmp_path / "starts").read_text().splitlines()) == 2, ended.stderr
    assert (ended.returncode == 0) == (num_failures == 1), ended.stderr
    if num_failures > 1:
        assert re.search(r"RayStartError: .*: ChildProcessError: raylet \(pid \d+\) exited with code 7", ended.stderr)
        assert re.search(r"log: \S+/raylet\.err, last 1 lines:\n  \| no space for objects", ended.stderr)


SESSION = """
import ray
from helmsman import initialize
with %s as cluster:
    if hasattr(cluster, "create_workers"):
        cluster.create_workers(Job(role="one"))
    said(ray._private.worker._global_node.get_session_dir_path())
    %s
"""


@pytest.mark.parametrize(
    ("made", "end", "is_kept"),
    [
        ('make_scheduler("ray", num_cpus=1)', "pass", False),
        ('make_scheduler("ray", num_cpus=1)', "sys.exit(0)", False),
        ('make_scheduler("ray", num_cpus=1)', "raise ValueError", True),
        ("initialize(num_cpus=1)", "pass", False),
    ],
)
def test_session_of_ray_goes_with_a_run_that_does_not_fail(made: str, end: str, is_kept: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="he-") as temporary:  # short, for the sockets of Ray
        ended = run(SESSION % (made, end), TMPDIR=temporary, RAY_TMPDIR=temporary)
        session = Path(ended.stdout.strip())
        assert session.parent == Path(temporary, "ray"), ended.stderr
        assert (session / "logs").is_dir() == is_kept
        assert sorted(os.listdir(session.parent)) == ([session.name, "session_latest"] if is_kept else [])


# --- its threads --------------------------------------------------------------------------------------------------------

USE = """
def use(scheduler, worker):
    alive = psutil.pid_exists(core("gcs_server")) and psutil.pid_exists(core("raylet"))
    said(alive, scheduler.call_engine(worker, "add"), scheduler.create_workers(Job(role="b")))
    scheduler.close()

"""

THREADS = """
made = []
thread = threading.Thread(target=lambda: made.append(start()))
thread.start()
thread.join()
use(*made[0])

async def in_executor():
    return await asyncio.get_running_loop().run_in_executor(None, start)

use(*asyncio.run(in_executor()))
"""

LATE = """
import ray
from helmsman.controller._aio.event_loop import run_sync
from helmsman.controller._ray_backend.embedded import bounded

scheduler, _ = start()
shut_down, gate = ray.shutdown, threading.Event()
ray.shutdown = lambda: (gate.wait(), shut_down())
scheduler.close()  # the processes are killed, and the call that shuts Ray down goes on
ray.shutdown = shut_down
threading.Timer(1.0, gate.set).start()
use(*start())
for late in (lambda: ray.put(1), lambda: ray.remote(lambda: 1).remote(), lambda: ray.util.placement_group([{"CPU": 1}])):
    try:
        run_sync(bounded(late))
    except Exception as error:
        said(ray.is_initialized(), "Ray has not been started" in str(error))
"""
USED = "True 1 ['b/0']"


def test_ray_outlives_the_thread_that_asked_for_it() -> None:
    """Ray's processes end with the thread that started them."""
    assert told(USE + THREADS) == [USED] * 2


def test_late_calls_neither_start_nor_end_a_ray() -> None:
    """A shutdown that takes too long would end the Ray that was started meanwhile; and many of Ray's calls start one of their
    own accord, which ends with the thread of the call."""
    assert told(USE + LATE) == [USED, *["False True"] * 3]


# --- its loss -----------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("closes", ["close", ""])
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_loss_of_a_core_process_fails_workers_and_spares_the_script(name: str, closes: str, tmp_path: Path) -> None:
    """With or without a close in between, another scheduler starts and does not suffer from the end of the first."""
    expected = [line.format(name=name) for line in OUTCOME if closes or "closed" not in line]
    assert told(LOSS, name, str(tmp_path / "started"), str(tmp_path / "never"), closes) == expected


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
    lines = told(STUCK, str(lives_s), **environment)  # type: ignore[arg-type]
    assert lines == ["['lost', 'lost'] held by Ray: True", "alive"]


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs the right to make a namespace of processes")
def test_loss_of_the_raylet_spares_a_script_below_init(tmp_path: Path) -> None:
    """Ray takes the parent for the raylet, and a parent with pid 1 for its end; so it is in containers and services."""
    launcher = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", '"$@"; exit $?', "init")
    arguments = ("raylet", str(tmp_path / "started"), str(tmp_path / "never"), "close")
    lines = told("assert os.getppid() == 1\n" + LOSS, *arguments, launcher=launcher)
    assert lines == [line.format(name="raylet") for line in OUTCOME]


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
    ended = run(ORDERLY)
    assert ended.stdout.splitlines() == ["ended"], ended.stderr
    assert "has ended" not in ended.stderr
