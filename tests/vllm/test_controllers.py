"""Test a rollout of vLLM instances, in workers or as servers, beside FSDPTrainEngine's ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from helmsman import (
    GenerationResult,
    Job,
    LocalScheduler,
    RetryGeneration,
    RolloutController,
    SamplingParams,
    SchedulingSpec,
    SupervisionPolicy,
    TrainController,
    WeightSync,
)
from helmsman.controller._rollout.health import Health
from helmsman.weights import ViaCollective, ViaDevice, ViaDisk, ViaMemory, WeightFormat
from tests.contract.helpers import wait_until
from tests.processes import command_of
from tests.vllm.vllm_models import (
    ENGINE,
    MAX_LEN,
    QWEN2_TIED,
    SPEC_ENV,
    folder_of,
    model_of,
    report,
)

pytestmark = pytest.mark.timeout(900)  # a start takes 15 s, and 60 s beside other work

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [100], [1, 2, 3, 4, 5, 6]]
LONG = SamplingParams(temperature=0.0, max_new_tokens=300)
SAMPLE = {"input_ids": [(5 * each) % 128 for each in range(40)]}
POLICY = SupervisionPolicy(probe_every_s=0.2, suspect_s=20.0, dead_s=60.0, restart_pause_s=0.1)
WAIT_S = 240.0
ENGINES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "vllm": ("helmsman.engines.vllm_engine.VLLMEngine", 0, ENGINE),
    "server": (
        "helmsman.engines.server_engine.ServerEngine",
        1,
        {"dtype": "float32", "max_model_len": MAX_LEN, "args": ("--enforce-eager",)},
    ),
}
"""Path, leased ports, and arguments."""


class World:
    """A trainer of two ranks and two instances of vLLM."""

    def __init__(self, scheduler: LocalScheduler, model: str, name: str) -> None:
        self.scheduler, self.name = scheduler, name
        engine, num_ports, kwargs = ENGINES[name]
        self.trainer = TrainController(
            scheduler,
            "helmsman.engines.train.FSDPTrainEngine",
            Job(role="train", replicas=2, tasks=[SchedulingSpec(cpu=0.5)]),
            engine_kwargs={"model": model, "lr": 5e-3},
        )
        self.rollout = RolloutController(
            scheduler,
            engine,
            Job(
                role="rollout",
                replicas=2,
                tasks=[SchedulingSpec(cpu=0.5, port_count=num_ports, env_vars=SPEC_ENV)],
            ),
            engine_kwargs={"model": model, **kwargs},
            retries=RetryGeneration(),
            supervision=POLICY,
        )
        self.trainer.initialize()
        self.rollout.initialize()

    def pid(self, worker_id: str) -> int:
        return (
            next(each.pid for each in self.scheduler.status() if each.worker_id == worker_id) or 0
        )

    def children(self, worker_id: str, name: str = "") -> list[psutil.Process]:
        """Return vLLM's processes of a worker: EngineCore, Worker, and a server with its guard."""
        found = psutil.Process(self.pid(worker_id)).children(recursive=True)
        return [each for each in found if name in command_of(each)]

    def state(self, worker_id: str) -> Health:
        return self.rollout.stats().instances[worker_id].state

    def require_the_trainers(self, what: str) -> None:
        """Check that both instances serve the trainer's weights and report its version."""
        before, prompts = self.generated(), PROMPTS * 4
        results = self.rollout.generate(prompts, GREEDY)
        rows = self.trainer.forward(
            [
                {"input_ids": prompt + each.token_ids}
                for prompt, each in zip(prompts, results, strict=True)
            ]
        )
        found = torch.cat(
            [
                (row[len(prompt) :] - torch.tensor(each.logprobs)).abs()
                for prompt, each, row in zip(prompts, results, rows, strict=True)
            ]
        )
        report(what, found)
        assert found.max() < 1e-3
        assert {version for each in results for version in each.versions} == {
            self.trainer.get_version()
        }
        assert set(self.rollout.versions().values()) == {self.trainer.get_version()}
        assert all(now > earlier for now, earlier in zip(self.generated(), before, strict=True)), (
            "both have taken part"
        )

    def generated(self) -> list[float]:
        return [
            self.scheduler.call_engine(each.id, "stats")["num_generated_tokens"]
            for each in self.rollout.workers
        ]


@pytest.fixture(scope="module", params=ENGINES)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    model = folder_of(model_of(QWEN2_TIED, seed=1), tmp_path_factory.mktemp("qwen2"))
    with LocalScheduler() as scheduler:
        yield World(scheduler, model, request.param)


@pytest.mark.parametrize("way", ["memory", "device", "collective", "disk"])
def test_train_step_reaches_vllm(world: World, way: str, tmp_path: Path) -> None:
    ways = {
        "memory": ViaMemory(),
        "device": ViaDevice(),
        "collective": ViaCollective(timeout=60.0),
        "disk": ViaDisk(str(tmp_path)),
    }
    world.trainer.train_batch([SAMPLE] * 4, "sft")
    form = WeightFormat(bucket_bytes=200_000, checksum=True)  # buckets that end within layers
    done = WeightSync(world.trainer, world.rollout, ways[way], form=form).push()  # type: ignore[arg-type]
    assert done.version == world.trainer.get_version()
    assert done.failed == {}
    world.require_the_trainers(way)


def test_push_during_requests(world: World) -> None:
    old = world.trainer.get_version()
    world.trainer.train_batch([SAMPLE] * 4, "sft")
    futures = _begun(world)
    WeightSync(world.trainer, world.rollout).push()
    found = [future.result(WAIT_S).versions for future in futures]
    for versions in found:
        assert versions == sorted(versions)
        assert set(versions) <= {old, old + 1}
    assert any(len(set(versions)) == 2 for versions in found)
    world.require_the_trainers("after a push between tokens")


def _begun(world: World) -> list[Future[GenerationResult]]:
    """Start more requests than both instances decode at once, and wait for tokens of both."""
    before = world.generated()
    futures = [
        world.rollout.submit([*prompt, number], LONG) for number in range(24) for prompt in PROMPTS
    ]

    def both() -> bool:
        return all(now > earlier for now, earlier in zip(world.generated(), before, strict=True))

    wait_until(both, "both decode", limit_s=WAIT_S)
    return futures


@pytest.mark.parametrize("name", ["EngineCore", "Worker"])
def test_vllm_death_fails_instance(world: World, name: str) -> None:
    if name == "Worker" and world.name == "server":
        pytest.skip("a server ends with any of its processes, and its engine sees its end alone")
    worker, version = world.pid("rollout/0"), world.trainer.get_version()
    family = world.children("rollout/0")
    (victim,) = [each for each in family if name in command_of(each)]
    # Without requests, only a probe detects the death.
    futures = _begun(world) if name == "EngineCore" else []
    victim.kill()
    assert not futures or not all(future.done() for future in futures)
    wait_until(
        lambda: world.state("rollout/0") is not Health.HEALTHY,
        "it is taken for dead",
        limit_s=WAIT_S,
    )
    assert world.state("rollout/1") is Health.HEALTHY
    for future in futures:
        result = future.result(WAIT_S)
        assert (len(result.token_ids), result.stop_reason, set(result.versions)) == (
            LONG.max_new_tokens,
            "length",
            {version},
        )
    wait_until(lambda: world.state("rollout/0") is Health.HEALTHY, "it is rebuilt", limit_s=WAIT_S)
    assert world.pid("rollout/0") != worker
    _ended(family)
    world.require_the_trainers(f"after the death of {name}")


def _ended(family: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left, [command_of(each) for each in left]


def test_destroy_ends_vllm_processes(world: World) -> None:
    family = world.children("rollout/0")
    world.rollout.remove(["rollout/0"])
    _ended(family)


def test_worker_end_ends_vllm(world: World) -> None:
    """The last test of this module: the instance is still being rebuilt at the end."""
    worker, family = world.pid("rollout/1"), world.children("rollout/1")
    assert len(family) >= 3, (
        "EngineCore, its worker and Python's tracker of their shared memory; or guard, server, "
        "EngineCore"
    )
    shared = {
        each.path
        for process in family
        for each in process.memory_maps()
        if each.path.startswith("/dev/shm/psm")
    }
    assert shared
    os.kill(worker, signal.SIGKILL)
    _ended(family)
    # The guard of a server kills that tracker, too, so names of memory may be left.
    assert world.name == "server" or not [path for path in shared if os.path.exists(path)]
