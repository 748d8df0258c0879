"""Titles of processes, and the logs of workers and of the driver."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helmsman import WorkerOutput
from helmsman.api import errors
from helmsman.api.generation import SamplingParams
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.contract.engines import Counter, Printer
from tests.contract.helpers import Driver, Engine, Gate, held, run_id, wait_until
from tests.contract.marks import needs_processes, only_local, ray_smoke
from tests.controller.engines import CountingRollout
from tests.processes import command_of

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def _title(pid: int) -> str:
    return command_of(psutil.Process(pid)).rstrip("\0 ")


def _titles() -> set[str]:
    return {command_of(each).rstrip("\0 ") for each in psutil.process_iter()}


def _log(scheduler: Scheduler, worker_id: str) -> str:
    (path,) = [status.log_path for status in scheduler.status() if status.worker_id == worker_id]
    return Path(path).read_text()


@ray_smoke
@needs_processes
def test_titles_show_role_and_calls(
    scheduler: Scheduler, backend: str, role: str, gate: Gate
) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker, Counter)
    pid = engine.call("pid")
    end = " (ray::RayRPCServer)" if backend == "ray" else ""
    with held(engine, gate):
        wait_until(lambda: _title(pid) == f"helmsman: {worker} wait{end}", "a call is shown")
    wait_until(lambda: _title(pid) == f"helmsman: {worker} idle{end}", "the title shows no call")
    assert not _title(os.getpid()).startswith("helmsman"), "the script keeps its title"
    helper = f"guardian of {worker}" if backend == "ray" else "forkserver"
    helpers = {f"helmsman: {each} (run {run_id(scheduler)})" for each in (helper, "watcher")}
    wait_until(lambda: helpers <= _titles(), "the helpers have titles")
    assert "PATH" in psutil.Process(pid).environ(), "the environment is unchanged"


@needs_processes
def test_worker_output_is_printed(
    scheduler: Scheduler, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = scheduler.create_workers(Job(role=role, replicas=2))
    engines = {each: Engine.create(scheduler, each, Printer) for each in (first, second)}
    engines[first].call("say", "before")
    wait_until(lambda: "before\n" in _log(scheduler, first), "the line is in the log")
    shown = ""

    def output() -> str:
        nonlocal shown
        shown += capsys.readouterr().out
        return shown

    with WorkerOutput(scheduler.log_dir, role):
        engines[first].call("say", "one")
        engines[second].call("say", "two\nthree")
        wait_until(lambda: "three" in output() and "one" in output(), "the lines are printed")
        engines[first].call("say", "four, without an end", end="")
        engines[first].call("say", " of its line")
    lines = output().splitlines()
    assert f"[{role}-0] one" in lines and f"[{role}-0] four, without an end of its line" in lines
    assert [line for line in lines if line.endswith(("two", "three"))] == [
        f"[{role}-1] two",
        f"[{role}-1] three",
    ]
    assert "before" not in shown
    engines[first].call("say", "after")
    wait_until(lambda: "after\n" in _log(scheduler, first), "the line is in the log")
    assert "after" not in output()


@ray_smoke
@needs_processes
def test_worker_log_has_start_and_end(
    make_own: Callable[..., Scheduler], backend: str, role: str
) -> None:
    with make_own() as scheduler:
        (worker,) = scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(gpu=1)]))
        engine = Engine.create(scheduler, worker, Counter)
        pid = engine.call("pid")
        path = Path(scheduler.status()[0].log_path)
        (device,) = scheduler.get_workers(role)[0].devices
    lines = [line for line in path.read_text().splitlines() if f"helmsman: {worker}" in line]
    assert all(re.match(TIME, line) for line in lines)
    start, *others = [line.partition(f"{worker} ")[2] for line in lines]
    facts = rf"pid {pid}, node [\d.]+, devices: cuda {device}, helmsman [\d.]+, python 3\.\d+"
    assert re.match(f"starts: {facts}", start), start
    assert ("ray " in start) == (backend == "ray")
    assert others[0].startswith(f"engine {worker} is created: Counter")
    assert others[1:] == [
        f"engine {worker} is destroyed",
        "ends: its scheduler has requested a shutdown",
    ]


@only_local
def test_worker_log_has_preemption_notice(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    os.kill(Engine.create(scheduler, worker, Counter).call("pid"), signal.SIGTERM)
    wait_until(
        lambda: "was sent SIGTERM, a preemption notice; it ends in 25 s" in _log(scheduler, worker),
        "the notice is in the log",
    )


class Sleeper(CountingRollout):
    """A rollout engine that sleeps and wakes."""

    async def sleep(self, level: int) -> None: ...

    async def wake(self, *, weights_only: bool = False) -> None: ...


@needs_processes
def test_logs_have_states_and_versions(make_own: Callable[..., Scheduler], role: str) -> None:
    with make_own() as scheduler:
        rollout = RolloutController(scheduler, Sleeper, Job(role=role))
        with rollout:
            rollout.initialize()
            rollout.generate([[1]] * 20, SamplingParams(max_new_tokens=1))
            rollout.sleep()
            rollout.wake()
            rollout.update_weights({"weight": "new"}, 7)
            own = _log(scheduler, f"{role}/0")
    engine = f"{role}/0 engine \\S+"
    for line in ("is asleep", "is awake", "serves weight version 7"):
        assert len(re.findall(rf"{TIME} helmsman: {engine} {line}\n", own)) == 1, own
    assert len(own.splitlines()) < 10, "calls are not logged"
    story = (scheduler.log_dir / "driver.log").read_text()
    for line in (
        f"role {role} is asleep",
        f"role {role} is awake",
        f"role {role}: 1 of 1 instances serve weight version 7",
    ):
        assert len(re.findall(rf"{TIME} INFO {line}\n", story)) == 1, story


def _driver_log(scheduler: Scheduler) -> list[str]:
    lines = (scheduler.log_dir / "driver.log").read_text().splitlines()
    assert all(re.match(TIME, line) for line in lines)
    return [line.split(maxsplit=3)[3] for line in lines]


def test_driver_log_has_each_operation(
    make_own: Callable[..., Scheduler], backend: str, role: str
) -> None:
    with make_own() as scheduler:
        scheduler.create_workers(Job(role=role, replicas=2))
        scheduler.scale(role, 3)
        engine = Engine.create(scheduler, f"{role}/1", Counter)
        if backend != "inline":
            with pytest.raises(errors.WorkerFailedError):
                engine.call("die", "SIGKILL")
            wait_until(
                lambda: any("SIGKILL" in line for line in _driver_log(scheduler)),
                "its death is logged",
            )
        scheduler.restart_worker(f"{role}/1")
        scheduler.scale(role, 1)
        with pytest.raises(errors.PlacementInfeasibleError):
            scheduler.create_workers(Job(role="large", tasks=[SchedulingSpec(gpu=99)]))
        logging.getLogger("helmsman.controller").warning("a warning of the library")
        scheduler.delete_workers(role)
    lines, place = _driver_log(scheduler), r"\(pid \d+, [\d.]+\)"
    expected = [
        rf"run {run_id(scheduler)} begins: \w+Backend, pid {os.getpid()}, helmsman ",
        rf"create_workers of {role} took \d+\.\d s: {role}/0 {place}, {role}/1 {place}$",
        rf"added to role {role}, which now has 3 workers: {role}/2 \(pid",
        *([] if backend == "inline" else [rf"{role}/1 was ended by SIGKILL"]),
        rf"restarted {role}/1 \(pid",
        rf"removing from role {role}, leaving 1: {role}/1, {role}/2$",
        r"create_workers of large failed: PlacementInfeasibleError: ",
        r"a warning of the library$",
        rf"deleting {role}$",
        rf"run {run_id(scheduler)} is closed$",
    ]
    found = iter(lines)
    for pattern in expected:
        assert any(re.match(pattern, line) for line in found), (
            f"{pattern} in its place of:\n" + "\n".join(lines)
        )


SCRIPT = """
import logging
with make() as scheduler:
    scheduler.create_workers(Job(role="a"))
    logging.getLogger("helmsman.somewhere").warning("shown by default")
    logging.basicConfig(level=logging.WARNING, format="by the script: %(message)s")
    logging.getLogger("helmsman.somewhere").warning("shown by the handler")
"""


@pytest.mark.not_on("ray")
def test_driver_log_leaves_root_logger(run_driver: Callable[..., Driver], tmp_path: Path) -> None:
    driver = run_driver(SCRIPT)
    assert driver.wait() == 0, driver.errors()
    assert driver.errors().splitlines() == [
        "shown by default",
        "by the script: shown by the handler",
    ]
    assert "WARNING shown by default\n" in (tmp_path / "logs" / "driver.log").read_text()
