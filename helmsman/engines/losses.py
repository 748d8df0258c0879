"""Losses as pure functions, as ``helmsman.api.engines.LossFn`` describes them.

Each returns the *sum* over the tokens of ``loss_mask``; the engine divides by their number in the global batch. That is the
token-level normalisation of DAPO (arXiv:2503.14476, eq. 8). The per-sequence mean of GRPO and the constant of Dr. GRPO come as
a column ``loss_weights`` (B, T) or (B,), which ``helmsman.api.advantages.sequence_weights`` computes for a whole batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

import torch

from helmsman.api.engines import LossFn


def sft_loss(logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood of the masked tokens.

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; ``loss_weights`` (B, T) or (B,) is optional.
    """
    mask = batch["loss_mask"]
    return (-logprobs * _weights(batch, logprobs) * mask).sum(), {}


def grpo_loss(
    logprobs: torch.Tensor,
    batch: Mapping[str, torch.Tensor],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Group relative policy optimisation: the clipped objective of PPO with advantages that need no critic.

    Sources: GRPO, DeepSeekMath, arXiv:2402.03300 eq. 3 and 4 (the unbiased KL estimate to the reference); PPO,
    arXiv:1707.06347 eq. 7 (the clip); DAPO, arXiv:2503.14476 (clip-higher: ``clip_high=0.28``; token-level mean); Dr. GRPO,
    arXiv:2503.20783 (see ``normalize_std`` of group_advantages and ``loss_weights``).

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; ``logprobs`` (B, T), those of the policy that generated the tokens; ``advantages``
            (B,) or (B, T); with ``kl_coef`` also ``ref_logprobs`` (B, T); ``loss_weights`` is optional.
        clip_low: The probability ratio counts down to 1 - clip_low.
        clip_high: The probability ratio counts up to 1 + clip_high.
        kl_coef: Weight of the KL divergence to the reference policy.

    Returns:
        The loss summed over tokens, and sums of: ``ratio``; ``clip_fraction``, tokens whose gradient the clip removed;
        ``policy_kl``, the k3 estimate of KL(behaviour || current) (http://joschu.net/blog/kl-approx.html); ``ref_kl`` where
        it is used.

    Raises:
        ValueError: The batch lacks a column.
    """
    needed = ("logprobs", "advantages", *(("ref_logprobs",) if kl_coef else ()))
    missing = [name for name in needed if name not in batch]
    if missing:
        raise ValueError(f"grpo_loss needs the column(s) {', '.join(missing)} in every sample; the batch has {sorted(batch)}")
    mask = batch["loss_mask"]
    # Padding and prompts may hold anything; masking the difference keeps infinities out of the gradient.
    log_ratio = (logprobs - batch["logprobs"]).masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    advantages = _per_token(batch["advantages"], logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        is_clipped = clipped * advantages < ratio * advantages
        stats = {
            "ratio": (ratio * mask).sum(),
            "clip_fraction": (is_clipped & mask).sum().float(),
            "policy_kl": ((ratio - 1 - log_ratio) * mask).sum(),
        }
    if kl_coef:
        ref_log_ratio = (batch["ref_logprobs"] - logprobs).masked_fill(~mask, 0.0)
        ref_kl = ref_log_ratio.exp() - ref_log_ratio - 1
        loss = loss + kl_coef * ref_kl
        stats["ref_kl"] = (ref_kl.detach() * mask).sum()
    return (loss * _weights(batch, logprobs)).masked_fill(~mask, 0.0).sum(), stats


LOSSES: dict[str, Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]] = {"sft": sft_loss, "grpo": grpo_loss}
"""Losses by the short name that train_batch takes."""


def resolve_loss(loss: LossFn | str) -> LossFn:
    """A loss from itself, its short name, or its import path ``package.module.function``.

    Raises:
        ValueError: There is no such loss.
    """
    if not isinstance(loss, str):
        return loss
    if loss in LOSSES:
        return LOSSES[loss]
    module, _, name = loss.rpartition(".")
    try:
        found: LossFn = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ValueError(
            f"there is no loss {loss!r}; give {', '.join(LOSSES)}, 'package.module.function' or a function"
        ) from exc
    return found


def _per_token(column: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return (column[:, None] if column.ndim == 1 else column).to(like.dtype)


def _weights(batch: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    weights = batch.get("loss_weights")
    return torch.ones((), device=like.device) if weights is None else _per_token(weights, like)
