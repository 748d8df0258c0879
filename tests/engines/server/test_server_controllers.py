"""ServerEngine as a rollout's instances, in worker processes: ports, deaths, ends."""

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
from helmsman.controller._generation.health import Health
from tests.contract.helpers import wait_until
from tests.engines.little_servers import PROGRAM, continuation, fields, tensors_of, write_model
from tests.processes import command_of

POLICY = SupervisionPolicy(probe_every_s=0.1, suspect_s=20.0, dead_s=60.0, restart_pause_s=0.1)
PROMPTS = [[1, 2], [3], [4, 5, 6], [7, 8]]
ROLE = "rollout"


class World:
    """Two instances, whose servers are little ones."""

    def __init__(self, scheduler: LocalScheduler, folder: Path) -> None:
        self.scheduler = scheduler
        self.rollout = RolloutController(
            scheduler,
            "helmsman.engines.server_engine.ServerEngine",
            Job(role=ROLE, replicas=2, tasks=[SchedulingSpec(cpu=0.5, port_count=1)]),
            engine_kwargs=fields("vllm", write_model(folder / "model", 0.0)),
            retries=RetryGeneration(),
            supervision=POLICY,
        )
        self.rollout.initialize()

    def pid(self, worker_id: str) -> int:
        return next(each.pid for each in self.scheduler.status() if each.worker_id == worker_id) or 0

    def server(self, worker_id: str) -> psutil.Process:
        return psutil.Process(self.scheduler.call_engine(worker_id, "server_pid"))

    def state(self, worker_id: str) -> Health:
        return self.rollout.load().instances[worker_id].state


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with LocalScheduler() as scheduler:
        yield World(scheduler, tmp_path)


def require(result: GenerationResult, prompt: list[int], weight: float = 0.0) -> None:
    assert result.token_ids == continuation(prompt, len(result.token_ids), weight)[0]


def servers() -> set[int]:
    """Pids of little servers that are children of this process's family, or of nobody."""
    return {each.pid for each in psutil.process_iter(["cmdline"]) if str(PROGRAM) in (each.info["cmdline"] or [])}


@pytest.mark.slow
def test_the_death_of_a_server_is_its_instances_and_its_requests_end_elsewhere(world: World) -> None:
    for worker in world.rollout.workers:  # each listens where its worker has a lease
        assert f"--port {worker.engine_ports[0]}" in command_of(world.server(worker.id))
    world.rollout.update_weights(tensors_of(1.0), 1)
    long = SamplingParams(temperature=0.0, max_new_tokens=2000)
    futures = [world.rollout.submit(prompt, long) for prompt in PROMPTS]
    for worker in world.rollout.workers:
        wait_until(lambda id_=worker.id: world.scheduler.call_engine(id_, "stats")["num_running"] > 0, "it generates")  # type: ignore[misc]
    old = world.server("rollout/0")
    old.kill()
    for future, prompt in zip(futures, PROMPTS, strict=True):
        result = future.result(60.0)
        assert (len(result.token_ids), set(result.versions)) == (2000, {1})
        require(result, prompt, 1.0)
    assert world.state("rollout/1") is Health.HEALTHY
    wait_until(lambda: world.state("rollout/0") is Health.HEALTHY, "it is built anew", limit_s=60.0)
    assert world.server("rollout/0").pid != old.pid
    assert world.rollout.versions() == {"rollout/0": 1, "rollout/1": 1}  # it serves with the weights of the last update
    for prompt, result in zip(PROMPTS, world.rollout.generate(PROMPTS, SamplingParams(max_new_tokens=8)), strict=True):
        require(result, prompt, 1.0)


@pytest.mark.slow
def test_a_server_that_dies_idle_is_noticed_by_a_probe(world: World) -> None:
    old = world.server("rollout/0")
    old.kill()
    wait_until(lambda: world.state("rollout/0") is not Health.HEALTHY, "it is taken for dead")
    wait_until(lambda: world.state("rollout/0") is Health.HEALTHY, "it is built anew", limit_s=60.0)
    assert world.server("rollout/0").pid != old.pid


@pytest.mark.slow
def test_the_servers_end_with_their_worker_and_their_run(tmp_path: Path) -> None:
    with LocalScheduler() as scheduler:
        world = World(scheduler, tmp_path)
        mine = {world.server(worker.id).pid for worker in world.rollout.workers}
        killed = world.server("rollout/0").pid
        os.kill(world.pid("rollout/0"), signal.SIGKILL)
        wait_until(lambda: killed not in servers(), "the killed worker's server has gone", limit_s=30.0)
    wait_until(lambda: not mine & servers(), "the run's servers have gone", limit_s=30.0)
