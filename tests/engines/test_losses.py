"""Losses against values worked out by hand, one row per case."""

from __future__ import annotations

import math

import pytest
import torch

from helmsman.engines.losses import grpo_loss, resolve_loss, sft_loss


def column(*values: float) -> torch.Tensor:
    """One row of tokens behind a first token that nothing predicts."""
    return torch.tensor([[0.0, *values]])


def mask(num_tokens: int) -> torch.Tensor:
    return torch.tensor([[False] + [True] * num_tokens])


def test_sft_sums_the_negative_log_likelihood_of_the_masked_tokens() -> None:
    batch = {"loss_mask": torch.tensor([[False, False, True, True], [False, True, False, False]])}
    logprobs = torch.tensor([[0.0, -9.0, -1.0, -2.0], [0.0, -4.0, -9.0, -9.0]])
    assert sft_loss(logprobs, batch)[0].item() == 7.0
    assert sft_loss(logprobs, {**batch, "loss_weights": torch.tensor([2.0, 0.5])})[0].item() == 8.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip_low", "clip_high", "loss", "is_clipped", "gradient"),
    [
        (1.0, 2.0, 0.2, 0.2, -2.0, 0, -2.0),
        (1.0, -2.0, 0.2, 0.2, 2.0, 0, 2.0),
        (1.5, 1.0, 0.2, 0.2, -1.2, 1, 0.0),
        (0.5, -1.0, 0.2, 0.2, 0.8, 1, 0.0),
        # The pessimistic bound: moves in the wrong direction are not clipped.
        (0.5, 1.0, 0.2, 0.2, -0.5, 0, -0.5),
        (1.5, -1.0, 0.2, 0.2, 1.5, 0, 1.5),
        # Clip-higher of DAPO.
        (1.25, 1.0, 0.2, 0.28, -1.25, 0, -1.25),
        (1.5, 1.0, 0.2, 0.28, -1.28, 1, 0.0),
        (0.85, -1.0, 0.1, 0.28, 0.9, 1, 0.0),
    ],
)
def test_grpo_clips_as_ppo(
    ratio: float, advantage: float, clip_low: float, clip_high: float, loss: float, is_clipped: int, gradient: float
) -> None:
    logprobs = column(-1.0 + math.log(ratio)).requires_grad_()
    batch = {"loss_mask": mask(1), "logprobs": column(-1.0), "advantages": torch.tensor([advantage])}
    result, stats = grpo_loss(logprobs, batch, clip_low=clip_low, clip_high=clip_high)
    result.backward()
    assert result.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad[0, 1].item() == pytest.approx(gradient, abs=1e-6)
    assert stats["clip_fraction"].item() == is_clipped
    assert stats["ratio"].item() == pytest.approx(ratio, abs=1e-6)
    assert stats["policy_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)


def test_grpo_adds_the_unbiased_kl_estimate_to_the_reference() -> None:
    batch = {
        "loss_mask": mask(1),
        "logprobs": column(-1.0),
        "ref_logprobs": column(-1.0 + math.log(2)),
        "advantages": torch.tensor([0.0]),
    }
    loss, stats = grpo_loss(column(-1.0), batch, kl_coef=0.1)
    # ref / current - log(ref / current) - 1 = 2 - log 2 - 1
    assert loss.item() == pytest.approx(0.1 * (1 - math.log(2)), abs=1e-6)
    assert stats["ref_kl"].item() == pytest.approx(1 - math.log(2), abs=1e-6)


def test_grpo_ignores_whatever_stands_outside_the_mask() -> None:
    logprobs = torch.tensor([[0.0, -1.0, -200.0]], requires_grad=True)
    batch = {
        "loss_mask": torch.tensor([[False, True, False]]),
        "logprobs": torch.tensor([[0.0, -1.0, 200.0]]),
        "ref_logprobs": torch.tensor([[0.0, -1.0, 300.0]]),
        "advantages": torch.tensor([[9.0, 1.0, 9.0]]),
    }
    loss, stats = grpo_loss(logprobs, batch, kl_coef=1.0)
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0, 0.0]]
    assert stats["ratio"].item() == 1.0


def test_grpo_names_the_columns_that_are_missing() -> None:
    with pytest.raises(ValueError, match="column\\(s\\) advantages, ref_logprobs"):
        grpo_loss(column(-1.0), {"loss_mask": mask(1), "logprobs": column(-1.0)}, kl_coef=0.1)


def test_losses_are_found_by_name_and_by_import_path() -> None:
    assert resolve_loss("sft") is sft_loss
    assert resolve_loss("helmsman.engines.losses.grpo_loss") is grpo_loss
    assert resolve_loss(sft_loss) is sft_loss
    for unknown in ("dpo", "helmsman.engines.losses.dpo", "nowhere.at.all"):
        with pytest.raises(ValueError, match="there is no loss"):
            resolve_loss(unknown)
