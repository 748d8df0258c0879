"""Weights and cache of two bytes: as far from float32 as transformers is with them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from helmsman.engines.vllm_engine import VLLMEngine
from tests.vllm.vllm_models import ENGINE, QWEN2_TIED, differences, folder_of, logprobs_of, model_of, report, weights_of
from tests.vllm.vllm_served import PROMPTS, Served

pytestmark = pytest.mark.timeout(300)


async def test_an_update_of_float32_weights_is_served_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    engine = VLLMEngine(model=folder_of(model_of(QWEN2_TIED, seed=1), tmp_path), **{**ENGINE, "dtype": "bfloat16"})
    engine.initialize()
    try:
        model = model_of(QWEN2_TIED, seed=2)
        await engine.update_weights(weights_of(model), 1)
        results = await Served(engine, model).generate(PROMPTS)
    finally:
        engine.destroy()
    found = differences(model, PROMPTS, results)
    report("bfloat16, vLLM from float32", found)
    short = copy.deepcopy(model).to(torch.bfloat16)
    pairs = [(prompt, each.token_ids) for prompt, each in zip(PROMPTS, results, strict=True)]
    theirs = torch.cat([(logprobs_of(short, *pair) - logprobs_of(model, *pair)).abs() for pair in pairs])
    report("bfloat16, transformers from float32", theirs)
    assert found.mean() < 2 * theirs.mean()
    assert found.max() < 3 * theirs.max()
