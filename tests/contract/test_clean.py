"""`helmsman clean` removes the remains of a run whose processes were all killed, and no others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from helmsman.controller._scheduler.run_registry import RunRecord
from tests.contract.helpers import (
    ROOT,
    WAIT,
    WITH_FAMILY,
    Driver,
    is_running,
    processes_with,
    wait_gone,
    wait_until,
)
from tests.contract.marks import needs_processes, only_local

pytestmark = needs_processes


def _helmsman(driver: Driver, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line with the driver's temporary folder."""
    return subprocess.run(
        [sys.executable, "-m", "helmsman", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": driver.temporary.name},
    )


def _records(driver: Driver) -> dict[int, RunRecord]:
    """Return the records of the driver's folder by the pid of their controllers."""
    paths = Path(driver.temporary.name).glob("helmsman-*/runs/*.json")
    return {
        record.pid: record
        for path in paths
        if (record := msgspec.json.decode(path.read_bytes(), type=RunRecord))
    }


@pytest.fixture
def abandoned(run_driver: Callable[..., Driver]) -> Iterator[tuple[Driver, dict[str, int]]]:
    """Provide a run of which only the workers' families are left; the rest could not clean up."""
    driver = run_driver(WITH_FAMILY + WAIT)
    family = {
        name: pid for name, pid in driver.facts()["pids"].items() if not name.startswith("worker")
    }
    wait_until(lambda: all(map(is_running, family.values())), "its family runs")
    os.kill(driver.process.pid, signal.SIGSTOP)
    # All are stopped before the first one is killed, so that no process can clean up.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in _run_processes(driver) - set(family.values()) - {driver.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.process.wait()
    yield driver, {name: pid for name, pid in family.items() if is_running(pid)}
    for pid in family.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run_processes(driver: Driver) -> set[int]:
    found = set(processes_with("HELMSMAN_DRIVER_MARK", driver.mark).values())
    run_id = _records(driver)[driver.process.pid].run_id
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if "guardian" in command and run_id in command:  # Its environment is empty.
                found.add(process.pid)
            found |= (
                {child.pid for child in process.children(recursive=True)}
                if process.pid in found
                else set()
            )
    return found


ONE_WORKER = """
scheduler = make()
scheduler.create_workers(Job(role="a"))
asyncio.run(scheduler.create_engine("a/0", engines.Counter))
tell(pids={"worker": scheduler.call_engine("a/0", "pid")}, run_id=scheduler.run_id)
"""


def test_clean_removes_dead_run_only(
    abandoned: tuple[Driver, dict[str, int]], run_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    driver, left = abandoned
    assert left, "the families run"
    temporary = Path(driver.temporary.name)
    foreign = temporary / "helmsman-notes-of-mine"
    for folder in (foreign, tmp_path / "other"):
        folder.mkdir()
    other = run_driver(
        ONE_WORKER + WAIT, tmp_path / "other", environment={"TMPDIR": str(temporary)}
    )
    living = other.facts()["pids"]
    run_id = _records(driver)[driver.process.pid].run_id

    done = _helmsman(driver, "clean", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"run {run_id}: dead, controller {driver.process.pid}" in done.stdout
    assert "would be removed" in done.stdout
    missed = {name for name, pid in left.items() if f"process {pid} of " not in done.stdout}
    assert not missed
    assert all(map(is_running, left.values()))

    done = _helmsman(driver, "clean")
    assert done.returncode == 0, done.stdout + done.stderr
    wait_gone(left)
    assert foreign.exists()
    assert driver.process.pid not in _records(driver)
    assert all(map(is_running, living.values())), "the other run continues"
    assert other.process.pid in _records(driver)
    assert run_id not in _helmsman(driver, "clean").stdout

    alive = _helmsman(driver, "clean", "--run", _records(driver)[other.process.pid].run_id)
    assert alive.returncode == 1
    assert "is alive; end its script" in alive.stderr
    assert all(map(is_running, living.values()))
    assert "alive" in _helmsman(driver, "runs").stdout


@only_local
def test_clean_finds_nothing_after_close(run_driver: Callable[..., Driver]) -> None:
    driver = run_driver(ONE_WORKER + "scheduler.close()")
    run_id = driver.facts()["run_id"]
    assert driver.wait() == 0
    assert _records(driver) == {}
    assert run_id not in _helmsman(driver, "clean").stdout
    assert (
        f"run {run_id}: nothing of it is here" in _helmsman(driver, "clean", "--run", run_id).stdout
    )


@only_local
def test_clean_ignores_forked_child(run_driver: Callable[..., Driver]) -> None:
    driver = run_driver(
        """
scheduler = make()
child = os.fork()
if child == 0:
    while True:
        time.sleep(3600)
tell(child=child)
"""
        + WAIT
    )
    child = driver.facts()["child"]
    (record,) = _records(driver).values()
    path = next(Path(driver.temporary.name).glob(f"helmsman-*/runs/{record.run_id}.json"))
    with path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.process.wait()
    assert is_running(child)
    assert f"run {record.run_id}: dead" in _helmsman(driver, "clean", "--dry-run").stdout
    os.kill(child, signal.SIGKILL)
