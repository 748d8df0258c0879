"""ServerEngine with vLLM's server as a rollout's instances beside FSDPTrainEngine's ranks: weights, deaths, ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from helmsman import (
    Job,
    LocalScheduler,
    RetryGeneration,
    RolloutController,
    SamplingParams,
    SchedulingSpec,
    SupervisionPolicy,
    TrainController,
    ViaCollective,
    ViaDisk,
    ViaMemory,
    WeightFormat,
    WeightSync,
)
from helmsman.controller._generation.health import Health
from tests.contract.helpers import wait_until
from tests.processes import command_of
from tests.vllm.vllm_models import MAX_LEN, QWEN2_TIED, SPEC_ENV, folder_of, model_of, report

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [100], [1, 2, 3, 4, 5, 6]]
SAMPLE = {"input_ids": [(5 * each) % 128 for each in range(40)]}
POLICY = SupervisionPolicy(probe_every_s=0.2, suspect_s=20.0, dead_s=60.0, restart_pause_s=0.1)
WAIT_S = 180.0

pytestmark = pytest.mark.timeout(400)  # two servers start within one


class World:
    """A trainer of two ranks and two vLLM servers."""

    def __init__(self, scheduler: LocalScheduler, model: str) -> None:
        self.scheduler = scheduler
        self.trainer = TrainController(
            scheduler,
            "helmsman.engines.train.FSDPTrainEngine",
            Job(role="train", replicas=2, tasks=[SchedulingSpec(cpu=0.5)]),
            engine_kwargs={"model": model, "lr": 5e-3},
        )
        self.rollout = RolloutController(
            scheduler,
            "helmsman.engines.server_engine.ServerEngine",
            Job(role="rollout", replicas=2, tasks=[SchedulingSpec(cpu=0.5, port_count=1, env_vars=SPEC_ENV)]),
            engine_kwargs={"model": model, "dtype": "float32", "max_model_len": MAX_LEN, "args": ("--enforce-eager",)},
            retries=RetryGeneration(),
            supervision=POLICY,
        )
        self.trainer.initialize()
        self.rollout.initialize()

    def pid(self, worker_id: str) -> int:
        return next(each.pid for each in self.scheduler.status() if each.worker_id == worker_id) or 0

    def family(self, worker_id: str) -> list[psutil.Process]:
        """The server's processes, and their guard."""
        return psutil.Process(self.pid(worker_id)).children(recursive=True)

    def state(self, worker_id: str) -> Health:
        return self.rollout.load().instances[worker_id].state

    def require_the_trainers(self, what: str) -> None:
        """Tokens and log-probabilities are those of the trainer's weights, of the trainer's version."""
        prompts = PROMPTS * 4
        results = self.rollout.generate(prompts, GREEDY)
        rows = self.trainer.forward(
            [{"input_ids": prompt + each.token_ids} for prompt, each in zip(prompts, results, strict=True)]
        )
        found = torch.cat(
            [
                (row[len(prompt) :] - torch.tensor(each.logprobs)).abs()
                for prompt, each, row in zip(prompts, results, rows, strict=True)
            ]
        )
        report(what, found)
        assert found.max() < 1e-3
        assert {version for each in results for version in each.versions} == {self.trainer.get_version()}
        assert set(self.rollout.versions().values()) == {self.trainer.get_version()}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    model = folder_of(model_of(QWEN2_TIED, seed=1), tmp_path_factory.mktemp("qwen2"))
    with LocalScheduler() as scheduler:
        yield World(scheduler, model)


@pytest.mark.parametrize("way", ["memory", "collective", "disk"])
def test_a_step_of_the_trainer_reaches_the_servers(world: World, way: str, tmp_path: Path) -> None:
    ways = {"memory": ViaMemory(), "collective": ViaCollective(timeout_s=60.0), "disk": ViaDisk(str(tmp_path))}
    world.trainer.train_batch([SAMPLE] * 4, "sft")
    form = WeightFormat(bucket_bytes=200_000, checksum=True)  # buckets that end within layers
    done = WeightSync(world.trainer, world.rollout, ways[way], form=form).push()  # type: ignore[arg-type]
    assert done.version == world.trainer.get_version()
    assert done.failed == {}
    print(f"{way}: {done.num_bytes} bytes in {done.seconds:.2f} s")
    world.require_the_trainers(way)


def test_the_death_of_a_server_is_its_instances_and_its_requests_end_elsewhere(world: World) -> None:
    version = world.trainer.get_version()
    long = SamplingParams(temperature=0.0, max_new_tokens=300)
    futures = [world.rollout.submit(prompt, long) for prompt in PROMPTS]
    before = world.scheduler.call_engine("rollout/0", "stats")["num_generated_tokens"]
    wait_until(
        lambda: world.scheduler.call_engine("rollout/0", "stats")["num_generated_tokens"] > before + 4,
        "it generates",
        limit_s=WAIT_S,
    )
    family = world.family("rollout/0")
    os.kill(world.scheduler.call_engine("rollout/0", "server_pid"), signal.SIGKILL)
    wait_until(lambda: world.state("rollout/0") is not Health.HEALTHY, "it is taken for dead", limit_s=WAIT_S)
    assert world.state("rollout/1") is Health.HEALTHY
    for future in futures:
        result = future.result(WAIT_S)
        assert (len(result.token_ids), result.stop_reason, set(result.versions)) == (300, "length", {version})
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left, [command_of(each) for each in left]
    wait_until(lambda: world.state("rollout/0") is Health.HEALTHY, "it is built anew", limit_s=WAIT_S)
    world.require_the_trainers("after the death of a server")  # with the weights of the last update


def test_no_server_outlives_its_worker(world: World) -> None:
    family = world.family("rollout/1")
    assert len(family) >= 3, "the guard, the server and its EngineCore"
    os.kill(world.pid("rollout/1"), signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left, [command_of(each) for each in left]
