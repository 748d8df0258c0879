"""Tests of the Ray that a scheduler starts for itself: its start, its loss and its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.controller.scheduler.ray.scripts import (
    LOSS,
    STARTED,
    check_interrupted_start,
    check_unanswered_call,
    loss_reports,
    replaced,
    reports_of,
    run,
)

pytestmark = pytest.mark.timeout(240)

FORK_HANDLER = "os.register_at_fork(after_in_child=os.abort)"

# --- start ----------------------------------------------------------------------------------------


def test_start_interrupted_by_signal() -> None:
    check_interrupted_start(1.5)


def test_start_follows_the_limit_of_the_script(tmp_path: Path) -> None:
    """The limit of Ray does not count, and a late start reports the running processes.

    No fork handler runs: libraries with threads may crash or block a forked child.
    """
    script = (
        replaced("gcs_server", tmp_path, 'sleep 5; exec "$program" "$@"') + "fail(4.0)\nattempt()"
    )
    script = script.replace("def attempt", f"{FORK_HANDLER}\n\ndef attempt", 1)
    lines = reports_of(script, RAY_gcs_server_port_wait_time_s="2")
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
    """The attempt fails at once with the log of that process, unlike with Ray alone."""
    ended = run(replaced("raylet", tmp_path, FAILING) + "fail()\nattempt()")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("Ray did not start, trying once more: ChildProcessError: raylet") == 2
    assert len((tmp_path / "starts").read_text().splitlines()) == 4, ended.stderr
    assert re.search(r": ChildProcessError: raylet \(pid \d+\) exited with code 7", ended.stdout)
    assert re.search(
        r"log: \S+/raylet\.err, last 1 lines:\n  \| no space for objects", ended.stdout
    )
    assert ended.stdout.splitlines()[-2:] == STARTED


# --- threads --------------------------------------------------------------------------------------

USE = """
def use(scheduler, worker):
    alive = psutil.pid_exists(core("gcs_server")) and psutil.pid_exists(core("raylet"))
    report(alive, scheduler.call_engine(worker, "add"), scheduler.create_workers(Job(role="b")))
    scheduler.close()

"""

THREADS = """
import ray
from helmsman._base.event_loop import run_sync
from helmsman.controller._scheduler.ray.embedded import bounded

made = []
thread = threading.Thread(target=lambda: made.append(start()))
thread.start()
thread.join()
shut_down, gate = ray.shutdown, threading.Event()
ray.shutdown = lambda: (gate.wait(), shut_down())
use(*made[0])  # The processes are killed, and the call that shuts Ray down continues.
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
        report(ray.is_initialized(), "Ray has not been started" in str(error))
"""


def test_ray_survives_threads_and_late_calls() -> None:
    """A Ray survives the thread that starts it, a late shutdown of another one, and late calls.

    Many calls of Ray would start a Ray that ends with the thread of the call.
    """
    assert reports_of(USE + THREADS) == [*["True 1 ['b/0']"] * 2, *["False True"] * 3]


# --- loss -----------------------------------------------------------------------------------------


def test_loss_of_a_core_process_spares_the_script(tmp_path: Path) -> None:
    """Another scheduler starts, with or without a close, and is independent of the first."""
    expected = loss_reports("gcs_server") + loss_reports("raylet", closes=False)
    assert reports_of(LOSS, str(tmp_path), "gcs_server:close", "raylet:") == expected


def test_unanswered_call_does_not_end_the_script() -> None:
    check_unanswered_call(6, RAY_gcs_rpc_server_reconnect_timeout_s="2")
