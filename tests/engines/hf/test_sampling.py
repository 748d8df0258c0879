"""Test that drawn tokens follow the distribution that the parameters describe."""

from __future__ import annotations

import pytest
import torch

from helmsman.api.generation import SamplingParams
from helmsman.engines._hf.decode_batch import (
    _JUST_BELOW_ONE,
    SamplingRows,
    draw_uniforms,
    sample_tokens,
)

LOGITS = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()


def rows(*params: SamplingParams) -> SamplingRows:
    drawn = [p for p in params if p.temperature > 0]
    return SamplingRows(
        temperature=torch.tensor([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k or len(LOGITS) for p in params]),
        top_p=torch.tensor([p.top_p for p in params]),
        all_greedy=not drawn,
        any_filtered=any(p.top_k or p.top_p < 1 for p in drawn),
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.5, 0.1, 0.25, 0.15]),
        (SamplingParams(temperature=0), [1, 0, 0, 0]),
        # Squared and normalised: 0.25, 0.01, 0.0625, 0.0225 over 0.345
        (SamplingParams(temperature=0.5), [0.7246, 0.0290, 0.1812, 0.0652]),
        (SamplingParams(top_k=1), [1, 0, 0, 0]),
        (SamplingParams(top_k=2), [2 / 3, 0, 1 / 3, 0]),
        (SamplingParams(top_k=100), [0.5, 0.1, 0.25, 0.15]),
        (SamplingParams(top_p=0.4), [1, 0, 0, 0]),
        (SamplingParams(top_p=0.6), [2 / 3, 0, 1 / 3, 0]),
        (SamplingParams(top_p=0.8), [5 / 9, 0, 2.5 / 9, 1.5 / 9]),
        # Top-p applies to the tokens that top-k kept: 0.556, 0.278, 0.167
        (SamplingParams(top_k=3, top_p=0.7), [2 / 3, 0, 1 / 3, 0]),
    ],
)
def test_sample_tokens_frequencies(params: SamplingParams, expected: list[float]) -> None:
    # Evenly spaced numbers instead of random ones: the frequencies are exact up to the spacing.
    num_draws = 10_000
    uniforms = (torch.arange(num_draws) + 0.5) / num_draws
    tokens, logprobs = sample_tokens(
        LOGITS.expand(num_draws, -1), uniforms, rows(*[params] * num_draws)
    )
    frequencies = tokens.bincount(minlength=4) / num_draws
    torch.testing.assert_close(
        frequencies, torch.tensor(expected, dtype=torch.float32), atol=2e-4, rtol=0
    )
    # The log-probabilities are those of the plain model for all parameters.
    torch.testing.assert_close(logprobs, LOGITS[tokens])


def test_sample_tokens_rows_independent() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=2),
        SamplingParams(temperature=2, top_p=0.7),
    ]
    generator = torch.Generator().manual_seed(0)
    logits, uniforms = torch.randn(4, 4, generator=generator), torch.rand(4, generator=generator)
    together, _ = sample_tokens(logits, uniforms, rows(*params))
    for row, param in enumerate(params):
        alone, _ = sample_tokens(logits[row : row + 1], uniforms[row : row + 1], rows(param))
        assert alone[0] == together[row]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_sample_tokens_extreme_uniforms(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    tokens, _ = sample_tokens(logits, torch.tensor([uniform]), rows(SamplingParams()))
    assert tokens.tolist() == [1 if uniform == 0 else 2]


def test_sample_tokens_tiny_temperature() -> None:
    tokens, _ = sample_tokens(
        LOGITS[None] * 1e4, torch.tensor([0.999]), rows(SamplingParams(temperature=1e-6))
    )
    assert tokens.tolist() == [0]


def test_draw_uniforms_by_seed_and_position() -> None:
    assert torch.equal(draw_uniforms(5, 4096)[:17], draw_uniforms(5, 17))
    seeds = [0, 1, 5, 5 + 2**32, 5 + 2**63, 2**64 - 1]  # all 64 bits count
    assert len({tuple(draw_uniforms(seed, 8).tolist()) for seed in seeds}) == len(seeds)
    numbers = draw_uniforms(3, 100_000)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # Six standard deviations of the mean of as many uniform numbers; the seed is fixed, so this
    # does not flake.
    assert abs(numbers.mean() - 0.5) < 6 * (1 / 12 / 100_000) ** 0.5


def test_sample_tokens_operators_without_npu_kernels() -> None:
    """The largest number below a total is computed without nextafter, which NPUs lack."""
    totals = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 0.5
    totals = torch.cat([totals, torch.tensor([1.0, 0.5, 2.0, 1.0 - 2**-24, 1.0 + 2**-23])])
    assert torch.equal(totals * _JUST_BELOW_ONE, totals.nextafter(torch.zeros_like(totals)))
