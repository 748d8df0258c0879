"""Test ServerEngine in the workers of a rollout: ports, deaths and ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helmsman import (
    GenerationResult,
    Job,
    LocalScheduler,
    RetryGeneration,
    RolloutController,
    SamplingParams,
    SchedulingSpec,
    SupervisionPolicy,
)
from helmsman.api.errors import HelmsmanError
from helmsman.controller._rollout.health import Health
from tests.contract.helpers import wait_until
from tests.engines.little_servers import PROGRAM, continuation, fields, tensors_of, write_model
from tests.engines.preload import PRELOAD
from tests.processes import command_of

POLICY = SupervisionPolicy(probe_every_s=0.1, suspect_s=20.0, dead_s=60.0, restart_pause_s=0.1)
PROMPTS = [[1, 2], [3], [4, 5, 6], [7, 8]]
ROLE, ENGINE = "rollout", "helmsman.engines.server_engine.ServerEngine"


class World:
    """A rollout of two instances with little servers."""

    def __init__(self, scheduler: LocalScheduler, folder: Path) -> None:
        self.scheduler = scheduler
        self.rollout = RolloutController(
            scheduler,
            ENGINE,
            Job(role=ROLE, replicas=2, tasks=[SchedulingSpec(cpu=0.5, port_count=1)]),
            engine_kwargs=fields("vllm", write_model(folder / "model", 0.0)),
            retries=RetryGeneration(),
            supervision=POLICY,
        )
        self.rollout.initialize()

    def pid(self, worker_id: str) -> int:
        return (
            next(each.pid for each in self.scheduler.status() if each.worker_id == worker_id) or 0
        )

    def server(self, worker_id: str) -> psutil.Process:
        return psutil.Process(self.scheduler.call_engine(worker_id, "server_pid"))

    def state(self, worker_id: str) -> Health:
        return self.rollout.stats().instances[worker_id].state


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Yield the rollout, and check that no server is left after it."""
    with LocalScheduler(preload=[*PRELOAD, ENGINE.rpartition(".")[0]]) as scheduler:
        world = World(scheduler, tmp_path_factory.mktemp("world"))
        yield world
        mine = {world.server(worker.id).pid for worker in world.rollout.workers}
    wait_until(lambda: not mine & servers(), "the run's servers have ended", limit_s=30.0)


def require(result: GenerationResult, prompt: list[int], weight: float = 0.0) -> None:
    assert result.token_ids == continuation(prompt, len(result.token_ids), weight)[0]


def servers() -> set[int]:
    """Return the pids of test servers that descend from this process or have no living parent."""
    return {
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if str(PROGRAM) in (each.info["cmdline"] or [])
    }


def is_replaced(world: World, old: psutil.Process) -> bool:
    """Return whether the first instance serves again, with another server."""
    try:
        new = world.scheduler.call_engine("rollout/0", "server_pid")
    except HelmsmanError:
        return False
    return world.state("rollout/0") is Health.HEALTHY and new != old.pid


def test_server_killed_in_flight(world: World) -> None:
    """The instance is lost, and its requests end on another instance."""
    for worker in world.rollout.workers:  # each listens on the leased port of its worker
        assert f"--port {worker.engine_ports[0]}" in command_of(world.server(worker.id))
    world.rollout.update_weights(tensors_of(1.0), 1)
    long = SamplingParams(temperature=0.0, max_new_tokens=2000)
    futures = [world.rollout.submit(prompt, long) for prompt in PROMPTS]
    for worker in world.rollout.workers:
        wait_until(
            lambda id_=worker.id: world.scheduler.call_engine(id_, "stats")["num_running"] > 0,  # type: ignore[misc]
            "it generates",
        )
    old = world.server("rollout/0")
    old.kill()
    for future, prompt in zip(futures, PROMPTS, strict=True):
        result = future.result(60.0)
        assert (len(result.token_ids), set(result.versions)) == (2000, {1})
        require(result, prompt, 1.0)
    assert world.state("rollout/1") is Health.HEALTHY
    wait_until(lambda: is_replaced(world, old), "it is rebuilt", limit_s=60.0)
    # the new server has the weights of the last update
    assert world.rollout.versions() == {
        "rollout/0": 1,
        "rollout/1": 1,
    }
    for prompt, result in zip(
        PROMPTS, world.rollout.generate(PROMPTS, SamplingParams(max_new_tokens=8)), strict=True
    ):
        require(result, prompt, 1.0)


def test_server_killed_idle(world: World) -> None:
    """A probe detects the death of an idle server."""
    old = world.server("rollout/0")
    old.kill()
    wait_until(lambda: is_replaced(world, old), "it is rebuilt", limit_s=60.0)


def test_worker_killed_with_its_server(world: World) -> None:
    old = world.server("rollout/0")
    os.kill(world.pid("rollout/0"), signal.SIGKILL)
    wait_until(
        lambda: old.pid not in servers(), "the killed worker's server has ended", limit_s=30.0
    )
    wait_until(lambda: is_replaced(world, old), "it is rebuilt", limit_s=60.0)
