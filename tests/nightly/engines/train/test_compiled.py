"""Test that compiled layers give the numbers of eager ones, and are compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from helmsman.engines.train import FSDPTrainEngine
from tests.engines.conftest import Make
from tests.engines.small_models import QWEN3, random_tokens

pytestmark = pytest.mark.timeout(900)  # a compilation takes a minute

BATCHES = [(5, 9, 12, 20), (3, 30), (7, 7, 8, 2, 14), (25,)]
"""Lengths of samples; a micro-batch has at most 24 tokens."""


def samples_of(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{"input_ids": random_tokens(length, seed=length)} for length in lengths]


def loss_and_gradients(
    engine: FSDPTrainEngine, lengths: tuple[int, ...]
) -> tuple[float, dict[str, torch.Tensor]]:
    model = engine._built_model()
    model.zero_grad(set_to_none=True)
    loss = engine._accumulate(samples_of(lengths), "sft", None)["loss"]
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.clone()
    return loss, gradients


@pytest.mark.parametrize(
    ("compute_dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.05)], ids=["exact", "cast"]
)
def test_compile_layers_equals_eager(make: Make, compute_dtype: str, most: float) -> None:
    """Gradient checkpointing compiles the most, since layers are computed again."""
    config = {
        "compute_dtype": compute_dtype,
        "model": {**QWEN3, "initializer_range": 0.1},
        "max_tokens_per_micro_batch": 24,
        "gradient_checkpointing": True,
    }
    counters.clear()
    eager, compiled = make(**config), make(**config, compile_layers=True)
    numbers = []
    for lengths in BATCHES:
        loss, gradients = loss_and_gradients(eager, lengths)
        own_loss, own_gradients = loss_and_gradients(compiled, lengths)
        assert own_loss == pytest.approx(loss, rel=most)
        for name, gradient in gradients.items():
            torch.testing.assert_close(own_gradients[name], gradient, atol=most, rtol=most)
        numbers.append((counters["stats"]["unique_graphs"], sum(counters["frames"].values())))
    assert numbers[0][0] > 0
    assert numbers == [numbers[0]] * len(BATCHES), "a batch was compiled again"
    before, after = eager.forward(samples_of(BATCHES[0])), compiled.forward(samples_of(BATCHES[0]))
    torch.testing.assert_close(after, before, atol=most, rtol=most)
