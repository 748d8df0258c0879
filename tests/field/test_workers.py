"""Reports about workers: calls, ends, commands, ports, imports and devices."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helmsman import (
    HelmsmanError,
    Job,
    RewardPool,
    RolloutController,
    Scheduler,
    SchedulingSpec,
    TrainController,
    WeightSync,
    WorkflowExecutor,
    make_scheduler,
)
from helmsman._desk.diagnosis import diagnose_run
from helmsman._desk.runs import find_run, take_two
from helmsman._process.ports import RANGE_VARIABLE
from helmsman.api.errors import EngineCreationError, WorkerFailedError
from helmsman.api.run_state import HangPolicy
from tests.contract.engines import Counter  # type: ignore[attr-defined]
from tests.contract.helpers import LIMIT_S, ROOT, Engine, Gate, wait_gone, wait_until
from tests.controller.engines import SAMPLES, CountingRollout, count_loss
from tests.field.engines import Blocking, Fallible, Published, Stepper

LIGHT = SchedulingSpec(cpu=0.1)


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exit 3", "SIGSEGV", "socket"])
def test_worker_falls_before_queued_calls(
    how: str, local: Scheduler, role: str, gate: Gate
) -> None:
    """TRL #3433: the server waits on a pipe for ever, after its worker has ended in a call.

    Eight calls are queued behind the one that ends the process, or its connection.
    """
    (worker,) = local.create_workers(Job(role=f"{role}-{how[-1]}", tasks=[LIGHT]))
    engine = Engine.create(local, worker, Fallible)
    falling = engine.begin("fall", how, os.getpid(), *gate.files)
    gate.wait_started()
    queued = [engine.begin("add") for _ in range(8)]
    wait_until(lambda: engine.health().num_queued == 8, "all calls are queued")
    gate.open()
    if how == "socket":
        assert falling.result(LIMIT_S) == engine.call("pid")
        assert [each.result(LIMIT_S) for each in queued] == list(range(2, 10))
        return
    cause = "exited with code 3" if how == "exit 3" else "was ended by SIGSEGV"
    for each in (falling, *queued):
        with pytest.raises(WorkerFailedError, match=cause):
            each.result(LIMIT_S)
    with pytest.raises(WorkerFailedError, match=cause):
        engine.call("add")


def test_answer_lost_after_a_step(local: Scheduler, role: str, tmp_path: Path) -> None:
    """SkyRL #2035: gradients doubled, as the client sends a step again whose answer was lost.

    The step is made once, and the error of a dead worker states that it may have begun.
    """
    steps = tmp_path / "steps"
    with TrainController(local, Stepper, Job(role=role, tasks=[LIGHT]), (str(steps),)) as trainer:
        for number in range(1, 4):
            figures = trainer.train_batch(SAMPLES, count_loss, loss_kwargs={"then": os.getpid()})
            assert figures["num_samples"] == len(SAMPLES)
            assert steps.read_text() == "step\n" * number
        with pytest.raises(WorkerFailedError, match="train_batch has no result"):
            trainer.train_batch(SAMPLES, count_loss, loss_kwargs={"then": "die"})
        assert steps.read_text() == "step\n" * 4


def test_health_during_a_long_update(local: Any, role: str, gate: Gate) -> None:
    """open-instruct #1454: the health check of the next step waits for a weight update."""
    job = Job(role=role, tasks=[LIGHT])
    with (
        RolloutController(local, Blocking, job, gate.files) as rollout,
        ThreadPoolExecutor(1) as threads,
    ):
        updating = threads.submit(rollout.update_weights, {"weight": 1}, 1)
        gate.wait_started()
        engine = Engine(local, f"{role}/0", f"{role}/0")
        assert engine.health().running == f"{role}/0.update_weights"
        diagnosis = diagnose_run(*take_two(find_run(local.run_id, alive=True)))
        text = " ".join([diagnosis.waits_for, *(each.cause for each in diagnosis.findings)])
        assert "update_weights" in text
        assert not updating.done()
        gate.open()
        assert updating.result(LIMIT_S) == 1


def stuck(_: Any) -> float:
    threading.Event().wait()
    return 0.0


def test_close_while_everything_waits(tmp_path: Path) -> None:
    """open-instruct #1611: the run does not end, since its clean-up waits for its workers.

    An episode waits for the rollout, a reward for its worker, and a push for the weights.
    """
    weights = Gate(tmp_path)
    asked = threading.Event()
    with make_scheduler("local", preload=()) as scheduler:
        trainer = TrainController(
            scheduler, Published, Job(role="train", tasks=[LIGHT]), tuple(weights.files)
        )
        rollout = RolloutController(
            scheduler, CountingRollout, Job(role="rollout", tasks=[LIGHT]), (True,)
        )
        pool = RewardPool(scheduler, stuck, Job(role="reward", tasks=[LIGHT]), timeout=3600.0)
        for each in (trainer, rollout, pool):
            each.initialize()

        async def episode(item: int) -> Any:
            if item == 1:
                asked.set()
                return await pool.async_score(item)
            return await rollout.async_generate_one([1, 2])

        executor = WorkflowExecutor(episode, episode_timeout=None)
        sync = WeightSync(trainer, rollout)
        with ThreadPoolExecutor(2) as threads:
            waiting: list[Future[Any]] = [
                threads.submit(executor.prepare_batch, itertools.count(), 2),
                threads.submit(sync.push, timeout=3600.0),
            ]
            weights.wait_started()
            assert asked.wait(LIMIT_S)
            wait_until(lambda: rollout.stats().instances["rollout/0"].num_in_flight, "it generates")
            pids = {each.worker_id: int(each.pid or 0) for each in scheduler.status()}
            scheduler.close()
            executor.close()
            for call in waiting:
                with pytest.raises(HelmsmanError):
                    call.result(LIMIT_S)
    wait_gone(pids)


def test_exit_in_a_report(
    local: Any, role: str, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """SkyRL #1691: the function that reports hangs calls sys.exit, and the watchdog goes on."""
    reported: list[str] = []

    def notify(text: str) -> None:
        reported.append(text)
        raise SystemExit(2)

    workers = local.create_workers(Job(role=role, replicas=2, tasks=[LIGHT]))
    engines = [Engine.create(local, worker, Counter) for worker in workers]
    for engine in (*engines, *engines, *engines):
        engine.call("add")
    local.reporter.watch(HangPolicy(floor_s=0.2, notify=notify))
    try:
        calls = []
        for engine in engines:
            calls.append(engine.begin("wait", *gate.files))
            wait_until(lambda: len(reported) == len(calls), "the hang is reported")
        gate.open()
        assert [each.result(LIMIT_S) for each in calls] == [4, 4]
    finally:
        gate.open()
        local.reporter.watch(HangPolicy())
    assert f"a hang was not reported to {notify!r}: SystemExit(2)" in caplog.text


# --- ports and commands ---------------------------------------------------------------------------

GRABBER = """
import collections, socket
held = collections.deque()
print("ready", flush=True)
while True:
    try:
        held.append(socket.create_server(("127.0.0.1", 0)))
    except OSError:
        held.popleft().close()
    if len(held) > 900:
        held.popleft().close()
"""


def test_commands_beside_a_grabber(local: Scheduler, role: str) -> None:
    """SkyRL #1625, prime-rl #2310: a reserved port is taken before the command binds it.

    Another process takes the ports that the system gives away, while commands start.
    """
    with subprocess.Popen([sys.executable, "-c", GRABBER], stdout=subprocess.PIPE) as grabber:
        try:
            assert grabber.stdout is not None
            grabber.stdout.readline()
            spec = SchedulingSpec(cpu=0.1, cmd="tests.field.listener {port}")
            for number in range(2):
                name = f"{role}-{number}"
                workers = local.create_workers(Job(role=name, replicas=12, tasks=[spec]))
                codes = [local.call_engine(each, "poll", "command") for each in workers]
                assert codes == [None] * 12
                local.delete_workers(name)
        finally:
            grabber.kill()


@pytest.mark.parametrize(
    ("how", "message"),
    [("ends", "has ended with exit code 0"), ("killed", "has ended with signal 9")],
)
def test_command_ends_before_it_is_ready(
    how: str, message: str, local: Scheduler, role: str
) -> None:
    """AReaL #1545 and #1583: the start waits for its whole time-out although the server died."""
    spec = SchedulingSpec(cpu=0.1, cmd=f"tests.field.listener {{port}} {how}")
    with pytest.raises(EngineCreationError, match=message):
        local.create_workers(Job(role=role, tasks=[spec]))
    assert role not in {each.worker_id.partition("/")[0] for each in local.status()}


def test_command_ends_after_it_is_ready(local: Scheduler, role: str, tmp_path: Path) -> None:
    """AReaL #1583: a command that ended with exit code 0 counts as healthy."""
    release = tmp_path / "release"
    spec = SchedulingSpec(cpu=0.1, cmd=f"tests.field.listener {{port}} until {release}")
    (worker,) = local.create_workers(Job(role=role, tasks=[spec]))
    assert not asyncio.run(local.check_health(worker)).failed_engines
    release.touch()
    wait_until(lambda: local.call_engine(worker, "poll", "command") is not None, "it has ended")
    failed = asyncio.run(local.check_health(worker)).failed_engines
    assert "has ended with exit code 0" in failed["command"]


# --- imports and devices --------------------------------------------------------------------------


def test_workers_import_no_engine_library(local: Scheduler, role: str) -> None:
    """SkyRL #2076: a worker dies in the import of an engine library that it does not use."""
    (worker,) = local.create_workers(Job(role=role, tasks=[LIGHT]))
    modules = Engine.create(local, worker, Fallible).call("modules")
    heavy = {"vllm", "sglang", "ray", "torch", "transformers", "datasets"}
    assert heavy.isdisjoint(modules)


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [["4", "5"], ["6", "7"]]),
        (
            {"CUDA_VISIBLE_DEVICES": "GPU-0a,GPU-0b,MIG-1,MIG-2"},
            [["GPU-0a", "GPU-0b"], ["MIG-1", "MIG-2"]],
        ),
        ({"HIP_VISIBLE_DEVICES": "4,5,6,7"}, [["4", "5"], ["6", "7"]]),
        (
            {"HIP_VISIBLE_DEVICES": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            [["4", "5"], ["6", "7"]],
        ),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, [["0", "1"], ["2", "3"]]),
    ],
    ids=["numbers", "names", "HIP", "both", "ROCR"],
)
def test_devices_under_a_mask(
    masks: dict[str, str], expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """prime-rl #1920, miles #1233, AReaL #910: the outer mask is ignored, or that of HIP unknown.

    ROCm numbers the devices of ROCR_VISIBLE_DEVICES from 0, so workers inherit it.
    """
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, mask in masks.items():
        monkeypatch.setenv(name, mask)
    with make_scheduler("local", num_gpus=4, accelerator="cuda", preload=()) as scheduler:
        workers = scheduler.create_workers(
            Job(role="actor", replicas=2, tasks=[SchedulingSpec(cpu=0.1, gpu=2)])
        )
        assert [each.devices for each in scheduler.get_workers("actor")] == expected
        for worker, ids in zip(workers, expected, strict=True):
            seen = Engine.create(scheduler, worker, Counter).call("environ", *names)
            assert seen == {
                "CUDA_VISIBLE_DEVICES": ",".join(ids),
                "HIP_VISIBLE_DEVICES": ",".join(ids),
                "ROCR_VISIBLE_DEVICES": masks.get("ROCR_VISIBLE_DEVICES"),
            }


# --- ports of several nodes -----------------------------------------------------------------------

ON_A_NODE = """
import socket, subprocess, sys
from helmsman import Job, SchedulingSpec, make_scheduler

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
taken = int(sys.argv[1])
with socket.create_server(("127.0.0.1", taken)), make_scheduler("local", preload=()) as scheduler:
    spec = SchedulingSpec(cpu=0.1, cmd="tests.field.listener {port}")
    scheduler.create_workers(Job(role="engine", tasks=[spec]))
    print(scheduler.get_workers("engine")[0].engine_ports[0])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of network need root")
def test_ports_of_each_node() -> None:
    """NeMo-RL #3159, AReaL #653: an engine takes a port that is free on the head's node only.

    Two nodes have namespaces of network of their own; each has another one of two ports taken.
    """
    environ = {**os.environ, "PYTHONPATH": str(ROOT), RANGE_VARIABLE: "30001-30002"}
    found = []
    for taken in ("30001", "30002"):
        command = ["unshare", "--net", sys.executable, "-c", ON_A_NODE, taken]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found == ["30002", "30001"]
