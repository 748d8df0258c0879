"""After a controller or worker ends, its processes, grandchildren included, and files are removed.

The workers' families ignore polite signals. They contain a process of every kind: of subprocess,
with a child of its own; in a session of its own; of multiprocessing's spawn; of fork; of fork and
setsid; a daemon of a double fork; and such a daemon with an empty environment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman.api.scheduler import Job, Scheduler
from tests.contract.engines import Driving, Family
from tests.contract.helpers import (
    WAIT,
    WITH_FAMILY,
    Driver,
    Engine,
    has_shared_memory,
    is_running,
    wait_gone,
    wait_until,
)
from tests.contract.marks import needs_processes, only_ray, ray_smoke

pytestmark = needs_processes


HUNG_CALL = """
with scheduler:
    tell(**facts)
    asyncio.run(scheduler.create_engine("family/0", engines.Counter, "counter"))
    started, never = os.path.join(folder, "started"), os.path.join(folder, "never")
    scheduler.call_engine("family/0", "wait", "counter", started, never)
"""
CLOSE_BESIDE_A_CHILD = """
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
began = time.monotonic()
scheduler.close()
scheduler.close()
elapsed_s = time.monotonic() - began
tell(**facts, child=child, elapsed_s=elapsed_s, limit_s=scheduler.timeouts.shutdown_s)
"""
"""The forked child holds a copy of every descriptor, so no connection closes with the driver."""


def _wait_end(driver: Driver, facts: dict[str, Any]) -> None:
    """Wait until nothing of a driver is left; fail if its interpreter printed warnings."""
    wait_gone(facts["pids"])
    if "child" in facts:
        assert is_running(facts["child"]), "a child of the script is not touched"
        os.kill(facts["child"], signal.SIGKILL)
    driver.wait_nothing_left()
    wait_until(
        lambda: not has_shared_memory(facts["memory"]),
        "the engines' shared memory is removed",
        limit_s=10.0,
    )
    warnings = [
        line
        for line in driver.errors().splitlines()
        if "Exception ignored" in line or "never awaited" in line
    ]
    assert not warnings, driver.errors()


@pytest.mark.parametrize(
    ("last_words", "codes", "said"),
    [
        pytest.param(HUNG_CALL, {-signal.SIGINT, 1}, "KeyboardInterrupt", id="Ctrl-C"),
        pytest.param("tell(**facts); 1 / 0", {1}, "ZeroDivisionError", id="exception"),
        pytest.param(CLOSE_BESIDE_A_CHILD, {0}, "", id="close"),
    ],
)
def test_driver_end(
    run_driver: Callable[..., Driver], last_words: str, codes: set[int], said: str
) -> None:
    driver = run_driver(WITH_FAMILY.replace("tell(", "facts = dict(") + last_words)
    facts = driver.facts()
    assert len(facts["pids"]) == 18
    if last_words is HUNG_CALL:
        wait_until(lambda: (driver.folder / "started").exists(), "the engine hangs")
        assert all(is_running(pid) for pid in facts["pids"].values())
        # a terminal sends it to the whole foreground group
        os.killpg(driver.process.pid, signal.SIGINT)
    assert driver.wait(limit_s=15.0) in codes, driver.errors()
    assert said in driver.errors()
    assert facts.get("elapsed_s", 0.0) < facts.get("limit_s", 1.0)
    _wait_end(driver, facts)


STOPPED = """
from helmsman.testing import FaultPlan, Hang
scheduler.create_workers(Job(role="a", replicas=2))
for index in range(2):
    asyncio.run(scheduler.create_engine(f"a/{index}", engines.Counter))
    pids[f"a/{index}"] = scheduler.call_engine(f"a/{index}", "pid")
plan = FaultPlan([Hang("a/0", at_step=1), Hang("a/1", at_step=1, seconds=60)])
records = plan.begin(scheduler).step(1)
assert all(record.done for record in records), records
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
tell(pids=pids, memory=memory, child=child)
"""
"""A stopped worker neither detects the end nor handles SIGTERM."""


def test_driver_killed_beside_another(run_driver: Callable[..., Driver], tmp_path: Path) -> None:
    """SIGKILL ends a driver with stopped workers and a child; SIGTERM ends another one later."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first = run_driver(WITH_FAMILY.rpartition("tell(")[0] + STOPPED + WAIT, folder=tmp_path / "one")
    second = run_driver(WITH_FAMILY + WAIT, folder=tmp_path / "two")
    facts, others = first.facts(), second.facts()
    wait_until(
        lambda: psutil.Process(facts["pids"]["a/0"]).status() == psutil.STATUS_STOPPED,
        "a worker is stopped",
    )
    assert all(is_running(pid) for pid in facts["pids"].values())
    first.process.kill()
    first.wait()
    _wait_end(first, facts)
    assert all(is_running(pid) for pid in others["pids"].values())
    os.kill(second.process.pid, signal.SIGTERM)
    assert second.wait(limit_s=15.0) in {-signal.SIGTERM, 128 + signal.SIGTERM}, second.errors()
    _wait_end(second, others)


def test_driver_killed_during_start(run_driver: Callable[..., Driver]) -> None:
    driver = run_driver(
        """
scheduler = make()
scheduler.create_workers(Job(role="first"))
tell(ready=True)
scheduler.create_workers(Job(role="more", replicas=3))
"""
        + WAIT
    )
    driver.facts()
    driver.process.kill()
    driver.wait()
    driver.wait_nothing_left()


@only_ray
def test_driver_and_head_killed(run_driver: Callable[..., Driver]) -> None:
    """The raylet's agents end although the head, to which they report, has ended before."""
    driver = run_driver('make().create_workers(Job(role="a"))\ntell(ready=True)\n' + WAIT)
    driver.facts()
    processes = psutil.Process(driver.process.pid).children(recursive=True)
    (head,) = (each for each in processes if "gcs_server" in each.name())
    head.kill()
    driver.process.kill()
    driver.wait()
    driver.wait_nothing_left()


STUCK_MODULE = """
import ctypes, os, pathlib
path = pathlib.Path(__file__).with_name("importing")
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
# A library on a slow file system holds the interpreter's lock while it is loaded.
ctypes.PyDLL(None).sleep(600)
"""


def test_driver_killed_during_preload(run_driver: Callable[..., Driver]) -> None:
    driver = run_driver(
        f"""
import threading
sys.path.insert(0, folder)
with open(os.path.join(folder, "stuck_module.py"), "w") as file:
    file.write({STUCK_MODULE!r})


def fork_a_child():
    engines.wait_for_file(os.path.join(folder, "importing"))
    child = os.fork()
    if child == 0:
        engines.stay(folder, "child")
    tell(child=child)


threading.Thread(target=fork_a_child).start()
make(preload=["stuck_module"]).create_workers(Job(role="a"))
"""
    )
    child = driver.facts()["child"]
    forkserver = int((driver.folder / "importing").read_text())
    driver.process.kill()
    driver.wait()
    wait_gone({"forkserver": forkserver})
    assert is_running(child), "a child of the script is not touched"
    os.kill(child, signal.SIGKILL)
    driver.wait_nothing_left()


# --- a worker's family, while the driver lives ----------------------------------------------------


@ray_smoke
def test_worker_family_ends(scheduler: Scheduler, role: str, tmp_path: Path) -> None:
    families = []
    for worker_id in scheduler.create_workers(Job(role=role, replicas=2)):
        folder = tmp_path / worker_id.rpartition("/")[2]
        folder.mkdir()
        engine = Engine.create(scheduler, worker_id, Family, None, str(folder))
        families.append((engine.call("start"), engine.call("share_memory")))
    (killed, memory), (deleted, other_memory) = families
    os.kill(killed["worker"], signal.SIGKILL)
    wait_gone(killed)
    wait_until(
        lambda: not has_shared_memory([memory]), "its shared memory is removed", limit_s=10.0
    )
    assert all(is_running(pid) for pid in deleted.values()), "the other worker's family still runs"
    scheduler.delete_workers(role)
    wait_gone(deleted)
    wait_until(
        lambda: not has_shared_memory([other_memory]), "its shared memory is removed", limit_s=10.0
    )


def test_worker_run_of_its_own_ends(scheduler: Scheduler, role: str, tmp_path: Path) -> None:
    runs = []
    for worker_id in scheduler.create_workers(Job(role=role, replicas=2)):
        folder = tmp_path / worker_id.rpartition("/")[2]
        folder.mkdir()
        engine = Engine.create(scheduler, worker_id, Driving)
        runs.append(
            {"the driver": engine.call("pid"), **engine.call("start", str(folder), timeout=60.0)}
        )
    killed, deleted = runs
    os.kill(killed["the driver"], signal.SIGKILL)
    wait_gone(killed)
    assert all(map(is_running, deleted.values()))
    scheduler.delete_workers(role)
    wait_gone(deleted)
