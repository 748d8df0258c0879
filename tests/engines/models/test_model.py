"""Tests of building models and of loading weights into them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from helmsman.engines._models.model import build_model, decoder_layers, max_positions
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.weight_transfer import incoming
from helmsman.engines.weights import apply_weights
from tests.engines.small_models import GPT2, LLAMA, QWEN2


def build(config: dict[str, Any], seed: int = 0) -> torch.nn.Module:
    return build_model(config, seed=seed, dtype=torch.float32)


def test_build_model_seed_decides_weights() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, second, other = build(QWEN2), build(QWEN2), build(QWEN2, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b, c in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c)


def test_build_model_seed_in_threads() -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(
            threads.map(
                lambda _: build_model(QWEN2, seed=3, dtype=torch.float32).state_dict(), range(16)
            )
        )
    for weights in made[1:]:
        assert all(torch.equal(weight, made[0][name]) for name, weight in weights.items())


@pytest.mark.parametrize("config", [QWEN2, LLAMA, GPT2], ids=lambda config: config["model_type"])
def test_decoder_layers_num(config: dict[str, Any]) -> None:
    assert len(decoder_layers(build(config))) == 2


def test_build_model_unknown() -> None:
    with pytest.raises(ValueError, match="no model folder 'nowhere'"):
        build_model("nowhere", seed=0, dtype=torch.float32)
    with pytest.raises(ValueError, match="no 'model_type'; it has: hidden_size"):
        build_model({"hidden_size": 8}, seed=0, dtype=torch.float32)
    with pytest.raises(ValueError, match="nonesuch"):
        build_model({"model_type": "nonesuch"}, seed=0, dtype=torch.float32)


def apply(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with incoming(weights, WeightGroup(torch.device("cpu"))) as arriving:
        apply_weights(model, arriving)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_apply_weights_tied_names(name: str) -> None:
    target, source = build(QWEN2), build(QWEN2, seed=1).state_dict()
    embedding = source.pop("lm_head.weight")
    del source["model.embed_tokens.weight"]
    with torch.inference_mode():  # as in the decoding thread
        apply(target, {**source, name: embedding.bfloat16()})
    assert torch.equal(target.get_parameter("lm_head.weight"), embedding.bfloat16().float())
    assert target.get_parameter("lm_head.weight") is target.get_parameter(
        "model.embed_tokens.weight"
    )


def test_apply_weights_unfit() -> None:
    target = build(LLAMA)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    weights = build(LLAMA, seed=1).state_dict()
    del weights["lm_head.weight"]
    weights["extra"] = torch.zeros(1)
    weights["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(
        ValueError,
        match="1 missing: lm_head.weight; 1 unexpected: extra; 1 of another shape: "
        "model.norm.weight",
    ):
        apply(target, weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, 128),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 512),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 64,
                }
            },
            256,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "rope_theta": 1e4,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            128,
        ),
    ],
)
def test_max_positions_of_scaled_embeddings(entries: dict[str, Any], expected: int) -> None:
    config = AutoConfig.for_model(**{**LLAMA, "max_position_embeddings": 128, **entries})
    assert max_positions(config) == expected


def test_max_positions_of_other_models() -> None:
    assert max_positions(AutoConfig.for_model(**GPT2)) == 128
    assert max_positions(AutoConfig.for_model("bloom")) is None
