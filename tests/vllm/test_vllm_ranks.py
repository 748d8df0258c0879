"""Two tensor-parallel ranks inside one vLLM instance: each takes its part of what a trainer sends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman.engines.vllm_engine import VLLMEngine
from helmsman.engines.weight_group import WeightGroup
from tests.vllm.test_vllm_engine import Served, broadcast, require_the_trainers, trainer_group, written
from tests.vllm.vllm_models import ENGINE, QWEN2_TIED, folder_of, model_of, weights_of

__all__ = ["trainer_group"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = model_of(QWEN2_TIED, seed=1)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        folder = folder_of(model, tmp_path_factory.mktemp("qwen2"))
        engine = VLLMEngine(model=folder, tensor_parallel_size=2, bucket_bytes=200_000, **ENGINE)
        engine.initialize()
        yield Served(engine, model)
        engine.destroy()
