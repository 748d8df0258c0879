"""Test that each of two tensor-parallel ranks of a vLLM instance loads its part of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helmsman.api.generation import SamplingParams
from helmsman.engines._weights.shared_memory import DeviceSharingError
from helmsman.engines.vllm_engine import VLLMEngine
from helmsman.engines.weights import PartialWeightUpdateError
from tests.vllm.vllm_models import (
    ENGINE,
    QWEN2_TIED,
    differences,
    folder_of,
    logprobs_of,
    model_of,
    weights_of,
)
from tests.vllm.vllm_served import (
    PROMPTS,
    Served,
    broadcast,
    hand_over,
    require_the_trainers,
    written,
)

pytestmark = pytest.mark.timeout(300)  # a start takes 15 s, and 60 s beside other work


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = model_of(QWEN2_TIED, seed=1)
    folder = folder_of(model, tmp_path_factory.mktemp("qwen2"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        environment.setenv("OMP_NUM_THREADS", "1")
        engine = VLLMEngine(
            model=folder,
            tensor_parallel_size=2,
            bucket_bytes=200_000,
            load_format="dummy",
            in_flight="recompute",
            **ENGINE,
        )
        engine.initialize()
        yield Served(engine, model)
        engine.destroy()


async def test_ranks_update_weights_from_memory(served: Served) -> None:
    before = await served.generate(PROMPTS)
    assert differences(served.model, PROMPTS, before).max() > 0.1, "they are not the folder's"
    await served.bring(model_of(QWEN2_TIED, seed=2), 1)
    await require_the_trainers(served, "two ranks, memory")


async def test_ranks_update_weights_from_files(served: Served, tmp_path: Path) -> None:
    served.model = model_of(QWEN2_TIED, seed=3)
    await served.engine.update_weights(written(served.model, tmp_path), 2)
    await require_the_trainers(served, "two ranks, files")


async def test_ranks_update_weights_by_broadcast(served: Served) -> None:
    model = model_of(QWEN2_TIED, seed=4)
    await broadcast(served, model, 3, weights_of(model))
    await require_the_trainers(served, "two ranks, broadcasts")
    with pytest.raises(ValueError, match="1 missing: model.norm.weight"):
        await broadcast(
            served,
            model,
            4,
            {k: each for k, each in weights_of(model).items() if k != "model.norm.weight"},
        )
    await require_the_trainers(served, "two ranks, after broadcasts that did not fit")


@pytest.mark.parametrize("num_sockets", [2, 1], ids=["a socket for each", "passed on by the first"])
async def test_ranks_update_weights_by_device(served: Served, num_sockets: int) -> None:
    version = served.engine.get_version() + 1
    model = model_of(QWEN2_TIED, seed=10 + num_sockets)
    await hand_over(served, model, version, weights_of(model), num_sockets)
    await require_the_trainers(served, f"two ranks, {num_sockets} sockets")
    wrong = {k: each for k, each in weights_of(model).items() if k != "model.norm.weight"}
    with pytest.raises(ValueError, match="1 missing: model.norm.weight"):
        await hand_over(served, model, version + 1, wrong, num_sockets)
    await require_the_trainers(served, "two ranks, after buffers that did not fit")


async def test_ranks_refuse_other_number_of_devices(served: Served) -> None:
    version, model = served.engine.get_version() + 1, served.model
    with pytest.raises(DeviceSharingError, match="the instance has 2 ranks on 3 devices"):
        await hand_over(served, model, version, weights_of(model), 3)


async def test_ranks_torn_update(served: Served, tmp_path: Path) -> None:
    with pytest.raises(PartialWeightUpdateError, match="model.norm.weight"):
        await served.engine.update_weights(
            written(model_of(QWEN2_TIED, seed=5), tmp_path, spoilt="model.norm.weight"), 5
        )
    model = model_of(QWEN2_TIED, seed=6)
    await broadcast(served, model, 6, weights_of(model))
    await require_the_trainers(served, "two ranks, after a torn update and a whole one")


async def test_ranks_recompute_cache(served: Served) -> None:
    version, old, new = served.engine.get_version(), served.model, model_of(QWEN2_TIED, seed=7)
    long = SamplingParams(seed=3, max_new_tokens=200)
    tasks = await served.all_begun([served.request(prompt, long) for prompt in PROMPTS])
    await served.bring(new, version + 1)
    for prompt, result in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
        num_old = result.versions.count(version)
        assert 0 < num_old < 200
        assert result.versions == [version] * num_old + [version + 1] * (200 - num_old)
        by_old, by_new = (logprobs_of(model, prompt, result.token_ids) for model in (old, new))
        found = (
            torch.cat([by_old[:num_old], by_new[num_old:]]) - torch.tensor(result.logprobs)
        ).abs()
        assert found.max() < 1e-3
