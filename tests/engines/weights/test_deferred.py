"""Test that trained models read their shards from a folder and never build the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from helmsman.engines._train import sharded_model
from helmsman.engines._weights.deferred import defer_model
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.conftest import Make
from tests.engines.models.folders import entries
from tests.engines.ranks import run_ranks
from tests.engines.small_models import (
    DEEPSEEK_V3,
    GEMMA3_MIXED,
    GPT2,
    LLAMA,
    MIXTRAL,
    QWEN2,
    QWEN3_MOE,
    random_tokens,
)

SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12)]
STEADY_GPT2 = {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES = {
    each["model_type"]: each
    for each in (LLAMA, QWEN2, STEADY_GPT2, GEMMA3_MIXED, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3)
}


def model_of(config: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("the whole model is built")


def losses(engine: FSDPTrainEngine) -> list[float]:
    return [engine.train_batch(SAMPLES, "sft")["loss"] for _ in range(2)]


@pytest.mark.parametrize("offload", ["none", "all"])
@pytest.mark.parametrize("config", FAMILIES.values(), ids=list(FAMILIES))
def test_deferred_equals_whole(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: dict[str, Any],
    offload: str,
) -> None:
    model_of(config).save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sharded_model, "build_model", refuse)
        deferred = make(model=str(tmp_path), offload=offload)
    exported = deferred.export_weights()
    saved = load_file(tmp_path / "model.safetensors")
    assert exported is not None
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    with monkeypatch.context() as patch:
        patch.setattr(sharded_model, "defer_model", lambda *_, **__: None)
        whole = make(model=str(tmp_path), offload=offload)
    for one, other in zip(deferred.forward(SAMPLES), whole.forward(SAMPLES), strict=True):
        assert torch.equal(one, other)
    assert losses(deferred) == pytest.approx(losses(whole), rel=1e-6)


def test_deferred_draws_a_value_head(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model_of(LLAMA).save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sharded_model, "build_model", refuse)
        deferred = make(model=str(tmp_path), head="value", init="value_head", seed=5)
    with monkeypatch.context() as patch:
        patch.setattr(sharded_model, "defer_model", lambda *_, **__: None)
        whole = make(model=str(tmp_path), head="value", init="value_head", seed=5)
    one, other = deferred.export_weights(), whole.export_weights()
    assert one is not None
    assert other is not None
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for values, others in zip(deferred.forward(SAMPLES), whole.forward(SAMPLES), strict=True):
        assert torch.equal(values, others)


def test_defer_model_unusual_files(make: Make, tmp_path: Path) -> None:
    """A folder of the layers alone has other names; it is built as a whole."""
    model = model_of(QWEN2)
    model.model.save_pretrained(tmp_path)
    entries(architectures=["Qwen2ForCausalLM"])(tmp_path)
    assert defer_model(str(tmp_path), seed=0, dtype=torch.float32) is None
    exported = make(model=str(tmp_path)).export_weights()
    assert exported is not None
    assert all(
        torch.equal(exported[name], each)
        for name, each in model.state_dict().items()
        if name in exported
    )


def test_defer_model_quantised_or_incomplete_files(tmp_path: Path) -> None:
    model = model_of(LLAMA)
    state = {name: each for name, each in model.state_dict().items() if "norm" not in name}
    model.save_pretrained(tmp_path / "incomplete", state_dict=state)
    assert defer_model(str(tmp_path / "incomplete"), seed=0, dtype=torch.float32) is None
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(tmp_path / "quantised")
    assert defer_model(str(tmp_path / "quantised"), seed=0, dtype=torch.float32) is None


def exported_by(folder: str, fields: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    engine = FSDPTrainEngine(model=folder, **fields)
    engine.create_process_group()
    engine.initialize()
    try:
        return engine.export_weights()
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    ("config", "world_size", "fields"),
    [
        (MIXTRAL, 3, {}),
        (QWEN3_MOE, 4, {"data_parallel_replicas": 2}),
        (QWEN2, 3, {}),
        (LLAMA, 4, {"tensor_parallel_size": 2}),
        (QWEN2, 2, {"tensor_parallel_size": 2}),
    ],
    ids=["uneven experts", "replicas", "uneven", "tensor parallel", "tied, tensor parallel"],
)
def test_deferred_on_several_ranks(
    tmp_path: Path, config: dict[str, Any], world_size: int, fields: dict[str, Any]
) -> None:
    model_of(config).save_pretrained(tmp_path, max_shard_size="20KB")
    saved = {
        name: tensor
        for file in tmp_path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    exported, *others = run_ranks(exported_by, world_size, str(tmp_path), fields)
    assert others == [None] * (world_size - 1)
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
