"""Policy losses: the clipped objective of PPO and its relatives; LOSSES has the names of all.

Advantages come from groups (GRPO) or a critic (PPO). All losses read ``advantages`` and
``logprobs`` (of the policy that generated the tokens) and take the same regularizers. Sums are over
tokens, which is DAPO's normalisation (arXiv:2503.14476, eq. 8). For the mean per sequence of GRPO
and GSPO, and the constant of Dr. GRPO, pass ``loss_weights``, which
``helmsman.api.advantages.sequence_weights`` computes for a whole batch. A column ``importance``
(B, T) multiplies the loss of each token, but not its regularizers. With ``top_ids`` and
``top_logprobs`` (B, T, k) of a teacher, ``top_coef`` (B,) times the reverse KL divergence to it is
added, and ``teacher_kl`` to the statistics; see ``columns.teacher_kl``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from helmsman.api.engines import PER_CHOICE, TOP_IDS, loss_traits
from helmsman.api.reward_shaping import KlEstimator
from helmsman.engines.losses.columns import (
    Columns,
    LossResult,
    kl_estimate,
    masked,
    masked_sum,
    require,
    teacher_kl,
    weighted_sum,
)

ImportanceMode: TypeAlias = Literal["truncate", "mask"]

_MAX_LOG_RATIO = 80.0
"""Above e^88 a ratio is infinite in float32, and the gradient of a clipped token would be 0 * inf =
NaN.
"""


@loss_traits(head="lm", needs_entropy="entropy_coef")
def grpo_loss(
    logprobs: torch.Tensor,
    batch: Columns,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    entropy_coef: float = 0.0,
) -> LossResult:
    """Compute PPO's clipped loss: minus the smaller of ``ratio * A`` and ``clip(ratio) * A``.

    Sources: PPO, arXiv:1707.06347 eq. 7 (the clip) and 9 (entropy); GRPO, arXiv:2402.03300 eq. 3
    and 4 (advantages of groups, KL to the reference); DAPO, arXiv:2503.14476 eq. 8 and 10
    (token-level sum, clip-higher with ``clip_high=0.28``); Dr. GRPO, arXiv:2503.20783
    (``normalize_std=False`` of group_advantages, ``loss_weights``); dual clip, arXiv:1912.09729 eq.
    5.

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; float32 ``logprobs`` (B, T) of the policy that generated
            the tokens; ``advantages`` (B,) or (B, T); with ``kl_coef`` also ``ref_logprobs`` (B,
            T); optionally ``loss_weights`` (B,) or (B, T).
        clip_low: The probability ratio is clipped from below at 1 - clip_low.
        clip_high: The probability ratio is clipped from above at 1 + clip_high.
        dual_clip: Tokens of negative advantage whose ratio exceeds this bound have no gradient;
            more than 1 + clip_high. None disables it.
        kl_coef: Weight of the KL divergence to the reference policy.
        kl_estimator: ``k1``, ``k2`` or ``k3``, see kl_estimate.
        entropy_coef: Weight of the entropy of the policy.

    Returns:
        The loss summed over tokens, and sums of: ``ratio``; ``clip_fraction``, tokens whose
        gradient the clip removed; ``policy_kl``, the k3 estimate of KL(behaviour || current); with
        their coefficients, ``ref_kl`` and ``entropy``.

    Raises:
        ValueError: The batch lacks a column, the estimator is unknown, or ``dual_clip`` is too
            small.
    """
    _require("grpo_loss", batch, kl_coef)
    mask = batch["loss_mask"]
    log_ratio = masked(logprobs, mask) - masked(batch["logprobs"], mask)
    clipped = _clipped(log_ratio, batch, clip_low, clip_high, dual_clip)
    return _regularized("grpo_loss", clipped, logprobs, batch, kl_coef, kl_estimator, entropy_coef)


@loss_traits(head="lm", needs_entropy="entropy_coef")
def decoupled_ppo_loss(
    logprobs: torch.Tensor,
    batch: Columns,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    importance_cap: float | None = 5.0,
    importance_mode: ImportanceMode = "mask",
    kl_coef: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    entropy_coef: float = 0.0,
) -> LossResult:
    """Compute PPO's loss clipped around a proximal policy, with importance weights per token.

    The weight of a token is its probability under the proximal policy over that under the behaviour
    policy. Source: AReaL, arXiv:2505.24298, after arXiv:2110.00641. With samples of several old
    versions, the trust region is around the weights before this batch's updates; the trainer
    computes their ``prox_logprobs`` by ``forward``. With on-policy samples and the same two
    columns, the loss is truncated importance sampling against the mismatch between the
    probabilities of rollout engine and trainer (TIS, F. Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl): ``importance_mode="truncate"``,
    ``importance_cap=2``.

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; float32 ``logprobs`` (B, T) of the rollout engine;
            ``prox_logprobs`` (B, T) of the proximal policy; ``advantages`` (B,) or (B, T); with
            ``kl_coef`` also ``ref_logprobs`` (B, T); optionally ``loss_weights`` (B,) or (B, T).
        clip_low: The ratio of current to proximal policy is clipped from below at 1 - clip_low.
        clip_high: That ratio is clipped from above at 1 + clip_high.
        dual_clip: Tokens of negative advantage whose ratio exceeds this bound have no gradient;
            more than 1 + clip_high. None disables it.
        importance_cap: Upper bound of the importance weight; None for no bound.
        importance_mode: Treatment of tokens whose weight exceeds the cap: ``mask`` drops them (like
            AReaL, whose cap is 5), ``truncate`` sets their weight to the cap.
        kl_coef: Weight of the KL divergence to the reference policy; not importance-weighted.
        kl_estimator: ``k1``, ``k2`` or ``k3``, see kl_estimate.
        entropy_coef: Weight of the entropy of the policy; not importance-weighted.

    Returns:
        The loss summed over tokens, and the sums of grpo_loss, where ``ratio``, ``clip_fraction``
        and ``policy_kl`` are relative to the proximal policy. Also the sums of
        ``importance_weight`` as applied, and ``importance_capped``, tokens above the cap.

    Raises:
        ValueError: The batch lacks a column, the estimator or mode is unknown, or ``dual_clip`` is
            too small.
    """
    _require("decoupled_ppo_loss", batch, kl_coef, "prox_logprobs")
    mask = batch["loss_mask"]
    proximal = masked(batch["prox_logprobs"], mask)
    log_ratio = masked(logprobs, mask) - proximal
    objective, stats = _clipped(log_ratio, batch, clip_low, clip_high, dual_clip)
    weight = (proximal - masked(batch["logprobs"], mask)).exp()
    if importance_mode not in ("truncate", "mask"):
        raise ValueError(
            f"there is no importance_mode {importance_mode!r}; expected 'truncate' or 'mask'"
        )
    if importance_cap is not None:
        above = weight > importance_cap
        stats["importance_capped"] = masked_sum(above, mask)
        weight = weight.masked_fill(above, importance_cap if importance_mode == "truncate" else 0.0)
    stats["importance_weight"] = masked_sum(weight, mask)
    weighted = objective * weight, stats
    return _regularized(
        "decoupled_ppo_loss", weighted, logprobs, batch, kl_coef, kl_estimator, entropy_coef
    )


@loss_traits(head="lm", needs_entropy="entropy_coef")
def gspo_loss(
    logprobs: torch.Tensor,
    batch: Columns,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    entropy_coef: float = 0.0,
) -> LossResult:
    """Compute the loss of group sequence policy optimisation, with one ratio per sequence.

    The ratio of a sequence is the geometric mean of its tokens' ratios: GSPO, arXiv:2507.18071 eq.
    5 and 7; the default clips are those of its section 5.1. For the mean over sequences of eq. 5,
    pass ``loss_weights`` from ``sequence_weights(..., "sequence")``; without them, long sequences
    count for more.

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; float32 ``logprobs`` (B, T) of the policy that generated
            the tokens; ``advantages`` (B,), one per sequence; with ``kl_coef`` also
            ``ref_logprobs`` (B, T); optionally ``loss_weights`` (B,) or (B, T).
        clip_low: The ratio is clipped from below at 1 - clip_low.
        clip_high: The ratio is clipped from above at 1 + clip_high.
        kl_coef: Weight of the KL divergence to the reference policy.
        kl_estimator: ``k1``, ``k2`` or ``k3``, see kl_estimate.
        entropy_coef: Weight of the entropy of the policy.

    Returns:
        The loss summed over tokens, and the sums of grpo_loss. ``ratio`` and ``policy_kl`` are per
        sequence, counted once for each of its tokens.

    Raises:
        ValueError: The batch lacks a column, or the estimator is unknown.
    """
    _require("gspo_loss", batch, kl_coef)
    mask = batch["loss_mask"]
    token_log_ratio = masked(logprobs, mask) - masked(batch["logprobs"], mask)
    log_ratio = token_log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    log_ratio = log_ratio.expand_as(token_log_ratio)
    clipped = _clipped(log_ratio, batch, clip_low, clip_high, dual_clip=None)
    return _regularized("gspo_loss", clipped, logprobs, batch, kl_coef, kl_estimator, entropy_coef)


@loss_traits(head="lm", needs_entropy="entropy_coef")
def cispo_loss(
    logprobs: torch.Tensor,
    batch: Columns,
    ratio_cap: float = 5.0,
    kl_coef: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    entropy_coef: float = 0.0,
) -> LossResult:
    """Compute a policy gradient loss with capped importance weights; every token keeps a gradient.

    CISPO of MiniMax-M1, arXiv:2506.13585 eq. 4 and 5, with the upper bound only, as there. The
    default cap is the one that arXiv:2510.13786 recommends.

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; float32 ``logprobs`` (B, T) of the policy that generated
            the tokens; ``advantages`` (B,) or (B, T); with ``kl_coef`` also ``ref_logprobs`` (B,
            T); optionally ``loss_weights`` (B,) or (B, T).
        ratio_cap: Upper bound of the probability ratio, which has no gradient.
        kl_coef: Weight of the KL divergence to the reference policy.
        kl_estimator: ``k1``, ``k2`` or ``k3``, see kl_estimate.
        entropy_coef: Weight of the entropy of the policy.

    Returns:
        The loss summed over tokens, and the sums of grpo_loss. ``clip_fraction`` counts tokens
        whose ratio is above the cap.

    Raises:
        ValueError: The batch lacks a column, or the estimator is unknown.
    """
    _require("cispo_loss", batch, kl_coef)
    mask = batch["loss_mask"]
    current = masked(logprobs, mask)
    log_ratio = (current - masked(batch["logprobs"], mask)).detach()
    ratio = log_ratio.exp()
    objective = -ratio.clamp(max=ratio_cap) * masked(batch["advantages"], mask) * current
    capped = objective, _ratio_stats(log_ratio, ratio > ratio_cap, mask)
    return _regularized("cispo_loss", capped, logprobs, batch, kl_coef, kl_estimator, entropy_coef)


def _require(loss: str, batch: Columns, kl_coef: float, *further: str) -> None:
    """Raise ValueError if a batch lacks a column that a policy's loss needs."""
    of_reference = ("ref_logprobs",) if kl_coef else ()
    require(loss, batch, ("logprobs", *further, "advantages", *of_reference))


def _clipped(
    log_ratio: torch.Tensor,
    batch: Columns,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> LossResult:
    advantages = masked(batch["advantages"], batch["loss_mask"])
    log_ratio = log_ratio.clamp(max=_MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = ratio * advantages
    objective = torch.minimum(plain, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        if dual_clip <= 1 + clip_high:
            raise ValueError(
                f"dual_clip is {dual_clip}; expected more than 1 + clip_high, which is "
                f"{1 + clip_high}"
            )
        objective = torch.where(
            advantages < 0, torch.maximum(objective, dual_clip * advantages), objective
        )
    return -objective, _ratio_stats(log_ratio, objective != plain, batch["loss_mask"])


def _ratio_stats(
    log_ratio: torch.Tensor, is_clipped: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            "ratio": masked_sum(log_ratio.exp(), mask),
            "clip_fraction": masked_sum(is_clipped, mask).float(),
            "policy_kl": masked_sum(kl_estimate(-log_ratio), mask),
        }


def _regularized(
    loss: str,
    found: LossResult,
    logprobs: torch.Tensor,
    batch: Columns,
    kl_coef: float,
    kl_estimator: KlEstimator,
    entropy_coef: float,
) -> LossResult:
    """Weigh a policy's loss (B, T) by ``importance``, add the regularizers, and sum."""
    (objective, stats), mask = found, batch["loss_mask"]
    if "importance" in batch:  # constants: helmsman.engines.losses.corrections
        objective = objective * masked(batch["importance"], mask)
    if kl_coef:
        ref_kl = kl_estimate(
            masked(logprobs, mask) - masked(batch["ref_logprobs"], mask), kl_estimator
        )
        objective = objective + kl_coef * ref_kl
        stats["ref_kl"] = masked_sum(ref_kl, mask)
    if TOP_IDS in batch:
        require(loss, batch, (*PER_CHOICE, "top_coef"))
        divergence = teacher_kl(loss, batch, "reverse")
        objective = objective + masked(batch["top_coef"], mask) * divergence
        stats["teacher_kl"] = masked_sum(divergence, mask)
    if entropy_coef:
        require(loss, batch, ("entropy",))
        entropy = masked(batch["entropy"], mask)
        objective = objective - entropy_coef * entropy
        stats["entropy"] = masked_sum(entropy, mask)
    return weighted_sum(objective, batch), stats
