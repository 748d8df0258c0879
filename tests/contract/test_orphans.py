"""However the controller ends, every process that it caused is gone within 10 s, also
grandchildren; and so are its files.

The families that the workers start are deaf to polite signals, and hold a process of every kind:
started by subprocess (with a child of its own), in a session of its own, by multiprocessing's
spawn, by fork, by fork and setsid, by the double fork of a daemon, and such a daemon whose program
starts with an empty environment.
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

pytestmark = pytest.mark.slow
inline_has_no_processes = pytest.mark.not_on(
    "inline", "one process, whose engines' children are the script's own"
)


def _sigkill(driver: Driver) -> None:
    os.kill(driver.process.pid, signal.SIGKILL)


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
"""A child that a script forks holds a copy of every descriptor, so no closed connection tells that
the driver ended.
"""


def _wait_end(driver: Driver, facts: dict[str, Any]) -> None:
    """Fail unless the families and all else of a driver that ends is gone in time, without
    complaints of the interpreter.
    """
    wait_gone(facts["pids"])
    if "child" in facts:
        assert is_running(facts["child"]), "it is the script's own, and not touched"
        os.kill(facts["child"], signal.SIGKILL)
    driver.wait_nothing_left()
    wait_until(
        lambda: not has_shared_memory(facts["memory"]),
        "the engines' shared memory is removed",
        limit_s=10.0,
    )
    complaints = [
        line
        for line in driver.errors().splitlines()
        if "Exception ignored" in line or "never awaited" in line
    ]
    assert not complaints, driver.errors()


@inline_has_no_processes
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
from helmsman.testing import FaultPlan, Hang, Slow
scheduler.create_workers(Job(role="a", replicas=2))
for index in range(2):
    asyncio.run(scheduler.create_engine(f"a/{index}", engines.Counter))
    pids[f"a/{index}"] = scheduler.call_engine(f"a/{index}", "pid")
plan = FaultPlan([Hang("a/0", at_step=1), Slow("a/1", at_step=1, factor=10)])
records = plan.begin(scheduler).step(1)
assert all(record.injection.done for record in records), records
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
tell(pids=pids, memory=memory, child=child)
"""
"""What is stopped neither notices an end nor heeds SIGTERM, and its helper lives beside it."""


@inline_has_no_processes
def test_driver_killed_beside_another(run_driver: Callable[..., Driver], tmp_path: Path) -> None:
    """By SIGKILL with stopped workers and a forked child; then by SIGTERM another, which the first
    end has not touched.
    """
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first = run_driver(WITH_FAMILY.rpartition("tell(")[0] + STOPPED + WAIT, folder=tmp_path / "one")
    second = run_driver(WITH_FAMILY + WAIT, folder=tmp_path / "two")
    facts, others = first.facts(), second.facts()
    wait_until(
        lambda: psutil.Process(facts["pids"]["a/0"]).status() == psutil.STATUS_STOPPED,
        "one is stopped",
    )
    assert all(is_running(pid) for pid in facts["pids"].values())
    _sigkill(first)
    first.wait()
    _wait_end(first, facts)
    assert all(is_running(pid) for pid in others["pids"].values())
    os.kill(second.process.pid, signal.SIGTERM)
    assert second.wait(limit_s=15.0) in {-signal.SIGTERM, 128 + signal.SIGTERM}, second.errors()
    _wait_end(second, others)


@inline_has_no_processes
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
    _sigkill(driver)
    driver.wait()
    driver.wait_nothing_left()


@pytest.mark.not_on("inline", "one process, whose engines' children are the script's own")
@pytest.mark.not_on("local", "it has no cluster under it")
def test_driver_and_head_killed(run_driver: Callable[..., Driver]) -> None:
    """The raylet's agents would tell the head that their raylet has gone, and wait for it."""
    driver = run_driver(
        """
scheduler = make()
from ray._private import worker
scheduler.create_workers(Job(role="a"))
tell(head=worker._global_node.all_processes["gcs_server"][0].process.pid)
"""
        + WAIT
    )
    os.kill(driver.facts()["head"], signal.SIGKILL)
    _sigkill(driver)
    driver.wait()
    driver.wait_nothing_left()


STUCK_MODULE = """
import ctypes, os, pathlib
path = pathlib.Path(__file__).with_name("importing")
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
# with the interpreter's lock, as the loader of a library on a slow file system holds it
ctypes.PyDLL(None).sleep(600)
"""


@inline_has_no_processes
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
    _sigkill(driver)
    driver.wait()
    wait_gone({"forkserver": forkserver})
    assert is_running(child), "it is the script's own, and not touched"
    os.kill(child, signal.SIGKILL)
    driver.wait_nothing_left()


# --- a worker's family, while the driver lives ----------------------------------------------------


@inline_has_no_processes
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
    assert all(is_running(pid) for pid in deleted.values()), (
        "the other worker's family is untouched"
    )
    scheduler.delete_workers(role)
    wait_gone(deleted)
    wait_until(
        lambda: not has_shared_memory([other_memory]), "its shared memory is removed", limit_s=10.0
    )


@inline_has_no_processes
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
