"""Corrections between sampler and trainer: importance weights of tokens, from constants alone.

The rollout engine samples by one policy, the trainer computes another: their kernels and types
differ, or the weights are older. The ratio of a token is its probability by the trainer before the
step over that by the rollout. A loss is multiplied by a weight that follows from it.

Sources: truncated importance sampling (TIS), F. Yao et al. 2025,
https://fengyao.notion.site/off-policy-rl; a band with two sides (IcePop), arXiv:2510.18855 section
3.1; one ratio for a sequence, as the product of its tokens' ratios or as their geometric mean, J.
Liu et al. 2025, https://richardli.xyz/rl-collapse, and GSPO, arXiv:2507.18071 eq. 7.
"""

from __future__ import annotations

import torch

from helmsman.api.corrections import Correction

_MAX_LOG_RATIO = 20.0


def importance_weights(
    rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor, correction: Correction
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute the weights of one answer's tokens.

    Args:
        rollout: (T,) log-probabilities by the rollout, of any dtype.
        trainer: (T,) log-probabilities by the trainer before the step.
        mask: (T,) bool, tokens that are trained on.
        correction: The kind of weights.

    Returns:
        (T,) float32 weights, 0 outside of the mask; and sums over the answer: ``weight``, ``ratio``
        and ``cut`` of tokens (the last counts tokens outside of the band or above the cap), and
        ``left_out``, 1 if the answer has an outlier.
    """
    mask = mask.bool()
    log_ratio = (trainer.float() - rollout.float()).nan_to_num(nan=0.0).where(mask, 0.0)
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    level = log_ratio
    if correction.level != "token":
        count = 1 if correction.level == "sequence" else mask.sum().clamp(min=1)
        level = (log_ratio.sum() / count).expand_as(log_ratio)
    weight = level.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    is_cut = (weight < correction.low) | (weight > correction.high)
    if correction.mode == "truncate":
        weight = weight.clamp(max=correction.high)
    elif correction.mode == "mask":
        weight = weight.masked_fill(is_cut, 0.0)
    elif correction.mode == "reject":
        weight = (~is_cut).float()
    else:
        weight = torch.ones_like(weight)
    most = correction.outlier or torch.inf
    is_outlier = bool(((ratio > most) | (ratio < 1 / most)).any())  # outside of the mask it is 1
    weight = weight.where(mask, 0.0) * (not is_outlier)
    return weight, {
        "weight": float(weight.sum()),
        "ratio": float(ratio.where(mask, 0.0).sum()),
        "cut": float((is_cut & mask).sum()),
        "left_out": float(is_outlier),
    }
