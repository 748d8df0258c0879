"""What is added to the objective of a policy: divergence from a reference policy, and entropy."""

from __future__ import annotations

import torch

from helmsman.api.reward_shaping import KlEstimator
from helmsman.engines.losses.columns import Columns, LossResult, masked, masked_sum, require, weighted_sum


def kl_estimate(log_ratio: torch.Tensor, estimator: KlEstimator = "k3") -> torch.Tensor:
    """Estimate of KL(p || q) from tokens that p has drawn (J. Schulman, http://joschu.net/blog/kl-approx.html).

    Args:
        log_ratio: log p - log q of each token.
        estimator: ``k1``, log p/q: unbiased, of high variance, often negative; its gradient as a loss is 0 on average, so it
            belongs in the reward. ``k2``, half its square: biased, but its gradient is that of the divergence. ``k3``,
            q/p - 1 - log q/p: unbiased and never negative; the one of GRPO (arXiv:2402.03300, eq. 4).

    Returns:
        Of the shape of ``log_ratio``.

    Raises:
        ValueError: There is no such estimator.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"there is no KL estimator {estimator!r}; expected 'k1', 'k2' or 'k3'")


def add_regularizers(
    loss: str,
    objective: torch.Tensor,
    stats: dict[str, torch.Tensor],
    logprobs: torch.Tensor,
    batch: Columns,
    *,
    kl_coef: float,
    kl_estimator: KlEstimator,
    entropy_coef: float,
) -> LossResult:
    """The sum over tokens of a policy's loss, of the divergence to the reference policy, and of entropy with a minus.

    Args:
        loss: Name of the loss, for messages.
        objective: (B, T), the policy's loss of each token.
        stats: Its statistics, to which ``ref_kl`` and ``entropy`` are added where they are used.
        logprobs: (B, T) float32 under the current weights.
        batch: With ``kl_coef`` it needs ``ref_logprobs``; with ``entropy_coef`` the engine gives ``entropy``.
        kl_coef: Weight of the divergence.
        kl_estimator: As kl_estimate.
        entropy_coef: Weight of the entropy.
    """
    mask = batch["loss_mask"]
    if kl_coef:
        ref_kl = kl_estimate(masked(logprobs, mask) - masked(batch["ref_logprobs"], mask), kl_estimator)
        objective = objective + kl_coef * ref_kl
        stats["ref_kl"] = masked_sum(ref_kl, mask)
    if entropy_coef:
        require(loss, batch, ("entropy",))
        entropy = masked(batch["entropy"], mask)
        objective = objective - entropy_coef * entropy
        stats["entropy"] = masked_sum(entropy, mask)
    return weighted_sum(objective, batch), stats
