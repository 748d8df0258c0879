"""Test a vLLM instance with a rank on each of two nodes: raylets here, with logical GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman import Job, SchedulingSpec
from helmsman.api.errors import EngineCallError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.weights import Weights
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.helpers import wait_until
from tests.multinode.conftest import TIMEOUTS, Nodes, gpu_node
from tests.processes import command_of
from tests.vllm.vllm_models import ENGINE, LLAMA, SPEC_ENV, folder_of, model_of
from tests.vllm.vllm_served import Served, require_the_trainers, written

pytestmark = pytest.mark.timeout(600)  # a start takes 40 s, and more beside other work

ENV = {**SPEC_ENV, "HELMSMAN_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
PATH = "helmsman.engines.vllm_engine.VLLMEngine"


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayScheduler]:
    nodes = Nodes([gpu_node(num_gpus=1), gpu_node(num_gpus=1)])
    try:
        with RayScheduler(timeouts=TIMEOUTS, log_dir=tmp_path_factory.mktemp("run")) as scheduler:
            yield scheduler
    finally:
        nodes.close()


def _worker(scheduler: RayScheduler, role: str, **spec: Any) -> str:
    task = SchedulingSpec(
        cpu=1, gpu=2, ray_placement_strategy="deferred", env_vars=ENV, **{"port_count": 1, **spec}
    )
    (worker,) = scheduler.create_workers(Job(role=role, replicas=1, tasks=[task]))
    return worker


class _Remote:
    """Adapts the engine of a worker to Served."""

    def __init__(self, scheduler: RayScheduler, worker: str) -> None:
        self._scheduler, self._worker = scheduler, worker

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        result: GenerationResult = await self.call("agenerate", request)
        return result

    async def update_weights(self, weights: Weights, version: int) -> int:
        loaded: int = await self.call("update_weights", weights, version)
        return loaded

    def get_version(self) -> int:
        version: int = self._scheduler.call_engine(self._worker, "get_version")
        return version

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(
            self._scheduler.call_engine, self._worker, method, None, *args
        )


def _find(name: str) -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [each for each in children if name in command_of(each)]


def _ranks() -> list[psutil.Process]:
    """Return vLLM's ranks of any parent."""
    return _find("VLLM::Worker")


def _is_of_core(rank: psutil.Process) -> bool:
    parent = rank.parent()
    return parent is not None and "EngineCore" in command_of(parent)


def _alive(rank: psutil.Process) -> bool:
    return rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE


async def test_instance_on_two_nodes(scheduler: RayScheduler, tmp_path: Path) -> None:
    model = model_of(LLAMA, seed=1)
    worker = _worker(scheduler, "rollout")
    model_folder = folder_of(model, tmp_path / "model")
    scheduler.create_engines([worker], PATH, model=model_folder, tensor_parallel_size=2, **ENGINE)
    scheduler.call_engine(worker, "initialize")
    wait_until(lambda: len(_ranks()) == 2, "both ranks have their titles")
    beside, away = sorted(_ranks(), key=lambda rank: not _is_of_core(rank))
    assert _is_of_core(beside) and not _is_of_core(away), "one rank on each node"
    served = Served(_Remote(scheduler, worker), model)
    await require_the_trainers(served, "two nodes")
    served.model = model_of(LLAMA, seed=2)
    (tmp_path / "new").mkdir()
    await served.engine.update_weights(written(served.model, tmp_path / "new"), 1)
    await require_the_trainers(served, "two nodes, files")

    away.kill()
    wait_until(lambda: not _alive(beside), "the other node's ranks have ended")
    with pytest.raises(
        EngineCallError,
        match=r"EngineDeadError: .*vLLM's ranks on node .* have ended: .* run: ray logs",
    ):
        await served.engine.call("agenerate", served.request([3]))
    scheduler.delete_workers("rollout")


async def test_instance_on_two_nodes_start_refused(scheduler: RayScheduler, tmp_path: Path) -> None:
    model = folder_of(model_of(LLAMA, seed=1), tmp_path)
    worker = _worker(scheduler, "few")
    scheduler.create_engines([worker], PATH, model=model, **ENGINE)
    with pytest.raises(
        EngineCallError,
        match=r"pipeline_parallel_size is 1, and the instance has 1 \+ 1 devices on 2 nodes; "
        "expected one rank for each device",
    ):
        scheduler.call_engine(worker, "initialize")
    scheduler.delete_workers("few")
    worker = _worker(scheduler, "portless", port_count=0)
    scheduler.create_engines([worker], PATH, model=model, tensor_parallel_size=2, **ENGINE)
    with pytest.raises(EngineCallError, match=r"set SchedulingSpec\(port_count=1\)"):
        scheduler.call_engine(worker, "initialize")
    scheduler.delete_workers("portless")
    worker = _worker(scheduler, "lost")
    scheduler.create_engines([worker], PATH, model=model, tensor_parallel_size=2, **ENGINE)
    starting = asyncio.create_task(_Remote(scheduler, worker).call("initialize"))
    await asyncio.to_thread(
        wait_until, lambda: bool(_find("InstanceNode.run")), "the other node's actor runs"
    )
    _find("InstanceNode.run")[0].kill()
    with pytest.raises(EngineCallError, match="vLLM's ranks on node .* have ended"):
        await starting
    scheduler.delete_workers("lost")
    wait_until(lambda: not _ranks(), "nothing is left")
