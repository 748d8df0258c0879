"""However the controller ends, every process that it caused is gone within 10 s, also grandchildren; and so are its files.

The families that the workers start are deaf to polite signals, and hold a process of every kind: started by subprocess (with
a child of its own), in a session of its own, by multiprocessing's spawn, by fork, by fork and setsid, by the double fork of
a daemon, and such a daemon whose program starts with an empty environment.
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
from tests.contract.helpers import WAIT, WITH_FAMILY, Driver, Engine, has_shared_memory, is_running, wait_gone, wait_until

pytestmark = pytest.mark.slow
inline_has_no_processes = pytest.mark.not_on("inline", "one process, whose engines' children are the script's own")


def _sigkill(driver: Driver) -> None:
    os.kill(driver.process.pid, signal.SIGKILL)


def _sigterm(driver: Driver) -> None:
    os.kill(driver.process.pid, signal.SIGTERM)


def _control_c(driver: Driver) -> None:
    """A terminal sends it to the whole foreground group."""
    os.killpg(driver.process.pid, signal.SIGINT)


@inline_has_no_processes
@pytest.mark.parametrize(
    ("end", "last_words", "codes"),
    [
        pytest.param(_sigkill, WAIT, {-signal.SIGKILL}, id="SIGKILL"),
        pytest.param(_sigterm, WAIT, {-signal.SIGTERM, 128 + signal.SIGTERM}, id="SIGTERM"),
        pytest.param(_control_c, WAIT, {-signal.SIGINT, 1}, id="Ctrl-C"),
        pytest.param(None, "1 / 0", {1}, id="exception"),
        pytest.param(None, "sys.exit(5)", {5}, id="sys.exit"),
        pytest.param(None, "", {0}, id="end without close"),
        pytest.param(None, "scheduler.close(); scheduler.close()", {0}, id="close"),
        pytest.param(None, "os._exit(9)", {9}, id="os._exit"),
    ],
)
def test_the_driver_ends(
    run_driver: Callable[..., Driver], end: Callable[[Driver], None] | None, last_words: str, codes: set[int]
) -> None:
    driver = run_driver(WITH_FAMILY + last_words)
    facts = driver.facts()
    pids: dict[str, int] = facts["pids"]
    assert len(pids) == 18
    if end is not None:
        assert all(is_running(pid) for pid in pids.values())
        end(driver)
    assert driver.wait(limit_s=15.0) in codes, driver.errors()
    wait_gone(pids)
    driver.wait_nothing_left()
    wait_until(lambda: not has_shared_memory(facts["memory"]), "the engines' shared memory is removed", limit_s=10.0)
    complaints = [line for line in driver.errors().splitlines() if "Exception ignored" in line or "never awaited" in line]
    assert not complaints, driver.errors()


@inline_has_no_processes
def test_the_driver_is_killed_while_its_workers_stand_still(run_driver: Callable[..., Driver]) -> None:
    """As a fault plan makes them: what is stopped neither notices an end nor heeds SIGTERM, and its helper lives beside it."""
    driver = run_driver(
        """
from helmsman.testing import FaultPlan, Hang, Slow
scheduler = make()
scheduler.create_workers(Job(role="a", replicas=2))
pids = {}
for index in range(2):
    asyncio.run(scheduler.create_engine(f"a/{index}", engines.Counter))
    pids[f"a/{index}"] = scheduler.call_engine(f"a/{index}", "pid")
records = FaultPlan([Hang("a/0", at_step=1), Slow("a/1", at_step=1, factor=10)]).begin(scheduler).step(1)
assert all(record.injection.done for record in records), records
tell(pids=pids)
"""
        + WAIT
    )
    pids: dict[str, int] = driver.facts()["pids"]
    wait_until(lambda: psutil.Process(pids["a/0"]).status() == psutil.STATUS_STOPPED, "one is stopped")
    _sigkill(driver)
    driver.wait()
    wait_gone(pids)
    driver.wait_nothing_left()


@inline_has_no_processes
def test_the_driver_is_killed_during_a_start(run_driver: Callable[..., Driver]) -> None:
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
def test_the_driver_and_the_head_under_it_are_killed_at_once(run_driver: Callable[..., Driver]) -> None:
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


@inline_has_no_processes
def test_the_driver_is_killed_with_forked_children_of_its_own(run_driver: Callable[..., Driver]) -> None:
    """A child that a script forks holds a copy of every descriptor, so no closed connection tells that the driver died."""
    driver = run_driver(
        """
scheduler = make()
scheduler.create_workers(Job(role="a"))
asyncio.run(scheduler.create_engine("a/0", engines.Counter))
worker = scheduler.call_engine("a/0", "pid")
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
tell(worker=worker, child=child)
"""
        + WAIT
    )
    facts = driver.facts()
    _sigkill(driver)
    wait_gone({"worker": facts["worker"]})
    assert is_running(facts["child"]), "it is the script's own, and not touched"
    os.kill(facts["child"], signal.SIGKILL)
    driver.wait()
    driver.wait_nothing_left()


STUCK_MODULE = """
import ctypes, os, pathlib
path = pathlib.Path(__file__).with_name("importing")
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock, as the loader of a library on a slow file system holds it
"""


@inline_has_no_processes
@pytest.mark.parametrize("has_child", [False, True])
def test_the_driver_is_killed_while_its_forkserver_imports(run_driver: Callable[..., Driver], has_child: bool) -> None:
    driver = run_driver(
        f"""
import threading
sys.path.insert(0, folder)
with open(os.path.join(folder, "stuck_module.py"), "w") as file:
    file.write({STUCK_MODULE!r})


def fork_a_child():
    engines.wait_for_file(os.path.join(folder, "importing"))
    child = os.fork() if {has_child} else None
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
    if has_child:
        assert is_running(child), "it is the script's own, and not touched"
        os.kill(child, signal.SIGKILL)
    driver.wait_nothing_left()


@inline_has_no_processes
def test_the_scheduler_is_closed_while_a_forked_child_of_the_driver_runs(run_driver: Callable[..., Driver]) -> None:
    driver = run_driver(
        """
scheduler = make()
scheduler.create_workers(Job(role="a"))
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
began = time.monotonic()
scheduler.close()
tell(child=child, elapsed_s=time.monotonic() - began, limit_s=scheduler.timeouts.shutdown_s)
"""
        + WAIT
    )
    facts = driver.facts()
    os.kill(facts["child"], signal.SIGKILL)
    assert facts["elapsed_s"] < facts["limit_s"]
    _sigkill(driver)
    driver.wait()
    driver.wait_nothing_left()


@inline_has_no_processes
def test_a_hung_engine_does_not_hold_up_control_c(run_driver: Callable[..., Driver]) -> None:
    driver = run_driver(
        """
scheduler = make()
scheduler.create_workers(Job(role="a"))
asyncio.run(scheduler.create_engine("a/0", engines.Counter))
worker = scheduler.call_engine("a/0", "pid")
tell(worker=worker)
with scheduler:
    scheduler.call_engine("a/0", "wait", None, os.path.join(folder, "started"), os.path.join(folder, "never"))
"""
    )
    worker = driver.facts()["worker"]
    wait_until(lambda: (driver.folder / "started").exists(), "the engine hangs")
    _control_c(driver)
    driver.wait(limit_s=10.0)
    assert "KeyboardInterrupt" in driver.errors()
    wait_gone({"worker": worker})
    driver.wait_nothing_left()


# --- a worker's family, while the driver lives --------------------------------------------------------------------------


@pytest.fixture
def family(scheduler: Scheduler, role: str, tmp_path: Path) -> tuple[Engine, dict[str, int]]:
    """Two workers with a family each; the engine and family of the first."""
    families = []
    for worker_id in scheduler.create_workers(Job(role=role, replicas=2)):
        folder = tmp_path / worker_id.rpartition("/")[2]
        folder.mkdir()
        engine = Engine.create(scheduler, worker_id, Family, None, str(folder))
        families.append((engine, engine.call("start")))
    role_survives = families[1][1]
    families[0][0].others = role_survives  # type: ignore[attr-defined]
    return families[0]


@inline_has_no_processes
def test_a_killed_worker_takes_its_family_along_and_no_other(family: tuple[Engine, dict[str, int]]) -> None:
    engine, pids = family
    others: dict[str, int] = engine.others  # type: ignore[attr-defined]
    memory = engine.call("share_memory")
    os.kill(pids["worker"], signal.SIGKILL)
    wait_gone(pids)
    wait_until(lambda: not has_shared_memory([memory]), "its shared memory is removed", limit_s=10.0)
    assert all(is_running(pid) for pid in others.values()), "the other worker's family is untouched"


@inline_has_no_processes
def test_deleted_workers_take_their_families_along(
    scheduler: Scheduler, role: str, family: tuple[Engine, dict[str, int]]
) -> None:
    engine, pids = family
    others: dict[str, int] = engine.others  # type: ignore[attr-defined]
    scheduler.delete_workers(role)
    wait_gone(pids | {f"{name} of the other": pid for name, pid in others.items()})


@inline_has_no_processes
@pytest.mark.parametrize("end", ["kill", "delete_workers"])
def test_a_worker_that_drives_a_run_of_its_own_ends(scheduler: Scheduler, role: str, tmp_path: Path, end: str) -> None:
    (worker_id,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker_id, Driving)
    pid = engine.call("pid")
    pids = engine.call("start", str(tmp_path), timeout=60.0)
    assert all(map(is_running, pids.values()))
    if end == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        scheduler.delete_workers(role)
    wait_gone(pids | {"the driver": pid})


@inline_has_no_processes
def test_two_runs_do_not_touch_each_other(run_driver: Callable[..., Driver], tmp_path: Path) -> None:
    script = """
scheduler = make()
scheduler.create_workers(Job(role="same"))
asyncio.run(scheduler.create_engine("same/0", engines.Counter))
tell(worker=scheduler.call_engine("same/0", "pid"))
"""
    drivers = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        drivers.append(run_driver(script + WAIT, folder=tmp_path / name))
    workers: list[Any] = [driver.facts()["worker"] for driver in drivers]
    _sigkill(drivers[0])
    wait_gone({"worker of the first": workers[0]})
    drivers[0].wait()
    drivers[0].wait_nothing_left()
    assert is_running(workers[1])
    _sigterm(drivers[1])
    drivers[1].wait()
    drivers[1].wait_nothing_left()
