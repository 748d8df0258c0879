"""Test that vLLM in bfloat16 is as close to float32 as transformers is."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from helmsman.api.errors import EngineDeadError
from helmsman.engines.vllm_engine import VLLMEngine
from tests.vllm.vllm_models import (
    ENGINE,
    QWEN2_TIED,
    differences,
    folder_of,
    logprobs_of,
    model_of,
    report,
    weights_of,
)
from tests.vllm.vllm_served import PROMPTS, Fatal, Served

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    model = folder_of(model_of(QWEN2_TIED, seed=1), tmp_path_factory.mktemp("qwen2"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        engine = VLLMEngine(model=model, **{**ENGINE, "dtype": "bfloat16"})
        engine.initialize()
        yield engine
        engine.destroy()


async def test_bfloat16_serves_float32_update(engine: VLLMEngine) -> None:
    model = model_of(QWEN2_TIED, seed=2)
    await engine.update_weights(weights_of(model), 1)
    results = await Served(engine, model).generate(PROMPTS)
    found = differences(model, PROMPTS, results)
    report("bfloat16, vLLM from float32", found)
    short = copy.deepcopy(model).to(torch.bfloat16)
    pairs = [(prompt, each.token_ids) for prompt, each in zip(PROMPTS, results, strict=True)]
    theirs = torch.cat(
        [(logprobs_of(short, *pair) - logprobs_of(model, *pair)).abs() for pair in pairs]
    )
    report("bfloat16, transformers from float32", theirs)
    assert found.mean() < 2 * theirs.mean()
    assert found.max() < 3 * theirs.max()


async def test_bfloat16_death_before_update(engine: VLLMEngine) -> None:
    """The last test of this module, since it ends the shared engine."""
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await engine.update_weights(Fatal(weights_of(model_of(QWEN2_TIED, seed=3)), at_look=2), 2)
    assert engine.get_version() == 1
