"""The Ray that a scheduler starts for itself goes with a start that is broken off."""

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
import os, sys
from ray._private import services
from helmsman import Job, make_scheduler
from helmsman.api.scheduler import Timeouts
%s
with make_scheduler("ray", num_cpus=1, timeouts=Timeouts(start_s=float(os.environ.get("START_S", "60")))) as scheduler:
    print(scheduler.create_workers(Job(role="one", replicas=1)), os.getpgid(0) == os.getpid())
    living = [each.process.pid for each in services.started if each.process.poll() is None]
    print(*(os.getpgid(pid) == pid for pid in living), sep=", ")
"""

STARTED = """
services.started, start = [], services.start_ray_process
def remember(*args, **kwargs):
    services.started.append(start(*args, **kwargs))
    return services.started[-1]
services.start_ray_process = remember
"""


def _start(change: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script that does ``change`` before it starts a cluster."""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", **environment}
    command = [sys.executable, "-c", START % (STARTED + change)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, start_new_session=True)


@pytest.mark.parametrize("handler", ["os.abort", "lambda: os.read(os.pipe()[0], 1)"])
def test_a_script_that_cannot_be_forked_starts_a_cluster(handler: str) -> None:
    """What libraries with threads of their own do in a forked child may crash it, or wait for ever."""
    ended = _start(f"os.register_at_fork(after_in_child={handler})")
    assert ended.returncode == 0, ended.stderr
    workers, groups = ended.stdout.splitlines()
    assert workers == "['one/0'] True"
    assert groups == "True, True", "Ray's head and the raylet, each in a group of its own, and none that only a dashboard needs"


def _replaced(name: str, folder: Path, script: str) -> str:
    """A change that puts a shell script in the place of a program of Ray's, which the script finds in $program."""
    program = folder / name
    lines = [
        "#!/bin/sh",
        f"""program="$({sys.executable} -c 'from ray._private import services as s; print(s.{name.upper()}_EXECUTABLE)')" """,
    ]
    program.write_text("\n".join([*lines, f"folder={folder}", script]) + "\n")
    program.chmod(0o755)
    return f"services.{name.upper()}_EXECUTABLE = {str(program)!r}"


def test_a_start_that_takes_too_long_tells_what_was_there_and_the_limit(tmp_path: Path) -> None:
    ended = _start(_replaced("gcs_server", tmp_path, "sleep 120"), START_S="4")
    assert ended.returncode != 0
    said = ended.stderr
    assert (
        "RayStartError: no Ray of its own could be started on this machine: TimeoutError: gcs_server has not published" in said
    )
    assert "within 4 s (Timeouts.start_s)" in said
    assert re.search(r"these of its processes were there: .*gcs_server \(pid \d+, sleeping\)", said)
    assert re.search(r"log: .*/session_\S+/logs", said)


def test_a_start_is_given_the_limit_of_the_script_and_not_that_of_ray(tmp_path: Path) -> None:
    slow = _replaced("gcs_server", tmp_path, 'sleep 5; exec "$program" "$@"')
    ended = _start(slow, RAY_gcs_server_port_wait_time_s="2")
    assert ended.returncode == 0, ended.stderr


FAILING = """
echo "$folder" >> "$folder/starts"
for word in "$@"; do case "$word" in --stderr_filepath=*) log="${word#*=}";; esac; done
[ "$(wc -l < "$folder/starts")" -gt %d ] && exec "$program" "$@"
echo "no space for objects" > "$log"
exit 7
"""


def test_a_process_that_exits_is_told_at_once_with_its_own_log(tmp_path: Path) -> None:
    """Ray would wait for its raylet half a minute, and say what its head has logged."""
    began = time.monotonic()
    ended = _start(_replaced("raylet", tmp_path, FAILING % 9))
    assert time.monotonic() - began < 50
    assert re.search(r"RayStartError: .*: ChildProcessError: raylet \(pid \d+\) exited with code 7", ended.stderr)
    assert re.search(r"log: \S+/raylet\.err, last 1 lines:\n  \| no space for objects", ended.stderr)
    assert len((tmp_path / "starts").read_text().splitlines()) == 2, "it is started twice"


def test_a_start_that_fails_once_is_repeated(tmp_path: Path) -> None:
    ended = _start(_replaced("raylet", tmp_path, FAILING % 1))
    assert ended.returncode == 0, ended.stderr
    assert "Ray did not start and is started once more: ChildProcessError: raylet" in ended.stderr
    assert len((tmp_path / "starts").read_text().splitlines()) == 2


SESSION = """
import os, sys
import ray
from helmsman import Job, initialize, make_scheduler
with %s as cluster:
    if hasattr(cluster, "create_workers"):
        cluster.create_workers(Job(role="one"))
    print(ray._private.worker._global_node.get_session_dir_path(), flush=True)
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
        environment = os.environ | {"RAY_AUTH_MODE": "disabled", "TMPDIR": temporary, "RAY_TMPDIR": temporary}
        command = [sys.executable, "-c", SESSION % (made, end)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        session = Path(ended.stdout.strip())
        assert session.parent == Path(temporary, "ray"), ended.stderr
        assert (session / "logs").is_dir() == is_kept
        assert sorted(os.listdir(session.parent)) == ([session.name, "session_latest"] if is_kept else [])
