"""Test steps whose results are read late, and the attention of older transformers."""

from __future__ import annotations

import types

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from helmsman.api.generation import SamplingParams
from helmsman.engines._hf.attention import attend
from helmsman.engines._hf.decode_batch import DecodeBatch
from helmsman.engines._hf.step_graphs import StepGraphs
from helmsman.engines._models.model import build_model
from tests.engines.small_models import QWEN2, random_tokens

GREEDY = SamplingParams(temperature=0)


@torch.inference_mode()
def test_step_read_late_and_beyond_the_end() -> None:
    """Steps of a sequence beyond its last column leave other rows, and its slot, intact."""
    model = build_model(QWEN2, seed=0, dtype=torch.float32)
    batch = DecodeBatch(model, num_slots=3, max_len=20, device=torch.device("cpu"))
    prompts = [random_tokens(length, seed=length) for length in (18, 3, 1)]

    def decode(prompt: list[int], num_steps: int) -> list[int]:
        batch.clear()
        batch.add([prompt], [GREEDY], [0])
        return [batch.step()()[0][0] for _ in range(num_steps)]

    alone = [decode(prompts[0], 2), decode(prompts[1], 9), decode(prompts[2], 9)]
    batch.clear()
    batch.add(prompts, [GREEDY] * 3, [0, 1, 2])
    reads = [batch.step() for _ in range(5)]  # the first sequence ends after two
    tokens = [list(column) for column in zip(*(read()[0] for read in reads), strict=True)]
    assert tokens[0][:2] == alone[0]
    batch.remove(0)
    batch.add([prompts[0]], [GREEDY], [0])
    more = [list(column) for column in zip(*(batch.step()()[0] for _ in range(2)), strict=True)]
    assert [tokens[2] + more[0], tokens[1] + more[1]] == [alone[2][:7], alone[1][:7]]
    assert more[2] == alone[0]


def test_attend_equals_sdpa() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 1, 8, generator=generator)
    key, value = (torch.randn(3, 2, 10, 8, generator=generator) for _ in range(2))
    hidden = torch.arange(10) > torch.tensor([[9], [0], [4]])
    mask = torch.zeros(3, 10).masked_fill(hidden, -torch.inf)[:, None, None]
    module = types.SimpleNamespace(num_key_value_groups=3, is_causal=True)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.5)
    attended, _ = attend(module, query, key, value, mask, scaling=0.5)  # type: ignore[arg-type]
    torch.testing.assert_close(attended, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("waits", [False, True])
def test_step_replayed(waits: bool) -> None:
    """The kernels of a function are replayed, or run without a graph if it cannot be captured."""
    state = torch.zeros(4, device="cuda")

    def add(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        state[:num_rows] += 1
        if waits:
            state.sum().item()
        return state[:num_rows].clone(), state.clone()

    graphs = StepGraphs(add, torch.device("cuda"))
    totals = [graphs(num_rows)[1].tolist() for num_rows in (2, 4, 2, 2, 4)]
    assert totals == [[1, 1, 0, 0], [2, 2, 1, 1], [3, 3, 1, 1], [4, 4, 1, 1], [5, 5, 2, 2]]
    assert graphs.is_enabled is not waits
