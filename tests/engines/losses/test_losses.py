"""Test losses against values computed by hand, one row per case."""

from __future__ import annotations

import functools
import math

import cloudpickle
import pytest
import torch

from helmsman.api.engines import SampleShare, loss_traits
from helmsman.engines.losses import (
    LOSSES,
    cispo_loss,
    decoupled_ppo_loss,
    distill_loss,
    dpo_loss,
    grpo_loss,
    gspo_loss,
    kl_estimate,
    prepare_loss,
    resolve_loss,
    reward_model_loss,
    sft_loss,
    value_loss,
)
from helmsman.engines.train_config import LOSS_NAMES


def column(*values: float) -> torch.Tensor:
    """Return one row of tokens behind a first token, which is not predicted."""
    return torch.tensor([[0.0, *values]])


def mask(num_tokens: int) -> torch.Tensor:
    return torch.tensor([[False] + [True] * num_tokens])


def test_sft_loss_sums_masked_tokens() -> None:
    batch = {"loss_mask": torch.tensor([[False, False, True, True], [False, True, False, False]])}
    logprobs = torch.tensor([[0.0, -9.0, -1.0, -2.0], [0.0, -4.0, -9.0, -9.0]])
    assert sft_loss(logprobs, batch)[0].item() == 7.0
    assert sft_loss(logprobs, {**batch, "loss_weights": torch.tensor([2.0, 0.5])})[0].item() == 8.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "kwargs", "loss", "is_clipped", "gradient"),
    [
        (1.0, 2.0, {}, -2.0, 0, -2.0),
        (1.0, -2.0, {}, 2.0, 0, 2.0),
        (1.5, 1.0, {}, -1.2, 1, 0.0),
        (0.5, -1.0, {}, 0.8, 1, 0.0),
        # The pessimistic bound: moves in the wrong direction are not clipped.
        (0.5, 1.0, {}, -0.5, 0, -0.5),
        (1.5, -1.0, {}, 1.5, 0, 1.5),
        # Clip-higher of DAPO.
        (1.25, 1.0, {"clip_high": 0.28}, -1.25, 0, -1.25),
        (1.5, 1.0, {"clip_high": 0.28}, -1.28, 1, 0.0),
        (0.85, -1.0, {"clip_low": 0.1, "clip_high": 0.28}, 0.9, 1, 0.0),
        # Above the third clip, c = 3, a token of negative advantage counts c * A and has no
        # gradient.
        (4.0, -1.0, {"dual_clip": 3.0}, 3.0, 1, 0.0),
        (2.5, -1.0, {"dual_clip": 3.0}, 2.5, 0, 2.5),
        (4.0, 1.0, {"dual_clip": 3.0}, -1.2, 1, 0.0),
    ],
)
def test_grpo_loss_clips(
    ratio: float,
    advantage: float,
    kwargs: dict[str, float],
    loss: float,
    is_clipped: int,
    gradient: float,
) -> None:
    logprobs = column(-1.0 + math.log(ratio)).requires_grad_()
    batch = {
        "loss_mask": mask(1),
        "logprobs": column(-1.0),
        "advantages": torch.tensor([advantage]),
    }
    result, stats = grpo_loss(logprobs, batch, **kwargs)  # type: ignore[arg-type]
    result.backward()
    assert result.item() == pytest.approx(loss, abs=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad[0, 1].item() == pytest.approx(gradient, abs=1e-5)
    assert stats["clip_fraction"].item() == is_clipped
    assert stats["ratio"].item() == pytest.approx(ratio, abs=1e-5)
    assert stats["policy_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-5)
    with pytest.raises(ValueError, match="more than 1 \\+ clip_high"):
        grpo_loss(logprobs, batch, dual_clip=1.1)


def test_grpo_loss_kl_to_reference() -> None:
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


def test_resolve_loss() -> None:
    assert resolve_loss("sft") is sft_loss
    assert resolve_loss("helmsman.engines.losses.grpo_loss") is grpo_loss
    assert resolve_loss(sft_loss) is sft_loss
    for unknown in ("dqo", "helmsman.engines.losses.dqo", "nowhere.at.all"):
        with pytest.raises(ValueError, match="there is no loss"):
            resolve_loss(unknown)
    for nothing, kind in ((None, "NoneType"), ("os.path", "module"), ("math.pi", "float")):
        with pytest.raises(
            ValueError, match=f"the loss {nothing!r} is a {kind}; expected a function"
        ):
            resolve_loss(nothing)  # type: ignore[arg-type]


NAN, INF = float("nan"), float("inf")
TOKENS, PAIRS = ("grpo", "ppo", "decoupled_ppo", "gspo", "cispo"), ("dpo", "reward_model")


def full_batch(num_rows: int = 4, length: int = 6) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return outputs and all columns of losses, NaN or infinite outside of the mask."""
    random = torch.Generator().manual_seed(3)
    mask = torch.arange(length) < torch.tensor([[6], [4], [3], [5]])[:num_rows]
    mask[:, 0] = False
    mask[1, 2] = False

    def tokens(scale: float = 0.4) -> torch.Tensor:
        return torch.randn(num_rows, length, generator=random) * scale - 1.0

    batch = {
        name: tokens()
        for name in ("logprobs", "prox_logprobs", "ref_logprobs", "returns", "values", "entropy")
    }
    batch["advantages"] = tokens(1.0) + 1.0
    batch["loss_weights"] = tokens(0.1) + 2.0
    batch |= {
        "loss_mask": mask,
        "pair": torch.arange(num_rows) // 2,
        "margin": torch.ones(num_rows),
    }
    return tokens(), batch


ARGUMENTS: dict[str, dict[str, object]] = {
    "sft": {},
    "distill": {"hard": 0.25},
    "grpo": {"kl_coef": 0.1, "entropy_coef": 0.2, "dual_clip": 3.0},
    "ppo": {"kl_coef": 0.1, "kl_estimator": "k2"},
    "decoupled_ppo": {"kl_coef": 0.1, "kl_estimator": "k1", "entropy_coef": 0.2},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1, "kl_coef": 0.1},
    "cispo": {"ratio_cap": 1.2, "kl_coef": 0.1},
    "value": {"clip": 0.25},
    "dpo": {},
    "reward_model": {"center_coef": 0.1},
}
OWN, TEACHER = "own_top_logprobs", "top_logprobs"


def with_choices(batch: dict[str, torch.Tensor], num_choices: int = 3) -> dict[str, torch.Tensor]:
    """Add a teacher's choices of 7 tokens to a batch, and its weight."""
    random, shape = torch.Generator().manual_seed(5), (*batch["loss_mask"].shape, 7)
    teacher, own = (torch.randn(shape, generator=random).log_softmax(-1) for _ in range(2))
    chosen, ids = teacher.topk(num_choices)
    return {
        **batch,
        "top_ids": ids,
        TEACHER: chosen,
        OWN: own.gather(-1, ids),
        "own": own,
        "teacher": teacher,
        "top_coef": torch.tensor([0.5, 1.0, 2.0, 3.0]),
    }


READS_BEFORE = "value"
"""The loss in which the output before a token stands for the token."""


def test_losses_names() -> None:
    assert tuple(LOSSES) == LOSS_NAMES


@pytest.mark.parametrize("name", [*LOSSES, "grpo with a teacher"])
def test_losses_ignore_values_outside_mask(name: str) -> None:
    outputs, batch = full_batch()
    name, _, has_teacher = name.partition(" ")
    if has_teacher or name == "distill":
        batch = with_choices(batch)
    mask = batch["loss_mask"]
    read = torch.roll(mask, -1, dims=1) if name == READS_BEFORE else mask

    def run(filling: float) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        columns = {
            key: column.masked_fill(~mask.view(*mask.shape, *[1] * (column.ndim - 2)), filling)
            if column.shape[:2] == mask.shape and column.is_floating_point()
            else column
            for key, column in batch.items()
        }
        if name == READS_BEFORE:
            columns["values"] = batch["values"].masked_fill(~read, filling)
        inputs = outputs.masked_fill(~read, filling).requires_grad_()
        loss, stats = LOSSES[name](inputs, columns, **ARGUMENTS[name])
        loss.backward()
        assert inputs.grad is not None
        return loss.detach(), stats, inputs.grad

    loss, stats, grad = run(0.0)
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert (grad[~read] == 0).all()
    assert (grad != 0).any()
    for filling in (NAN, INF, -INF):
        other, other_stats, other_grad = run(filling)
        assert torch.equal(other, loss)
        assert torch.equal(other_grad, grad)
        assert other_stats.keys() == stats.keys()
        assert all(torch.equal(other_stats[key], stats[key]) for key in stats)


@pytest.mark.parametrize("name", [*TOKENS, "value", "sft", "distill"])
def test_losses_of_parts_sum_to_whole(name: str) -> None:
    outputs, batch = full_batch()
    batch = with_choices(batch)
    whole, stats = LOSSES[name](outputs, batch, **ARGUMENTS[name])
    parts = [
        LOSSES[name](
            outputs[rows], {key: column[rows] for key, column in batch.items()}, **ARGUMENTS[name]
        )
        for rows in (slice(0, 1), slice(1, 4))
    ]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item(), rel=1e-5)
    for key, value in stats.items():
        assert sum(part[key].item() for _, part in parts) == pytest.approx(
            value.item(), rel=1e-5, abs=1e-6
        )


@pytest.mark.parametrize(
    ("name", "kwargs", "needed"),
    [
        ("grpo", {}, ["logprobs", "advantages"]),
        ("ppo", {"kl_coef": 0.1}, ["logprobs", "advantages", "ref_logprobs"]),
        ("decoupled_ppo", {}, ["logprobs", "prox_logprobs", "advantages"]),
        ("gspo", {"kl_coef": 0.1}, ["logprobs", "advantages", "ref_logprobs"]),
        ("cispo", {}, ["logprobs", "advantages"]),
        ("distill", {}, ["top_ids", "top_logprobs"]),
        ("value", {}, ["returns"]),
        ("value", {"clip": 0.1}, ["returns", "values"]),
        ("dpo", {}, ["pair", "ref_logprobs"]),
        ("reward_model", {}, ["pair"]),
    ],
)
def test_losses_missing_columns(name: str, kwargs: dict[str, object], needed: list[str]) -> None:
    outputs, batch = full_batch()
    batch = with_choices(batch) if name == "distill" else batch
    for missing in needed:
        given = {key: column for key, column in batch.items() if key != missing}
        with pytest.raises(
            ValueError, match=f"_loss needs the column\\(s\\) {missing} in every sample"
        ) as raised:
            LOSSES[name](outputs, given, **kwargs)
        assert LOSSES[name].__name__ in str(raised.value)
        assert f"it reads {', '.join(needed)}, and the batch has {', '.join(sorted(given))}" in str(
            raised.value
        )


def one_token(**columns: float) -> dict[str, torch.Tensor]:
    return {"loss_mask": mask(1), **{name: column(value) for name, value in columns.items()}}


@pytest.mark.parametrize("behaviour", [-100.0, -INF])
@pytest.mark.parametrize(
    ("name", "kwargs", "advantage", "loss"),
    [
        ("grpo", {}, 1.0, -1.2),
        ("grpo", {}, 0.0, 0.0),
        ("grpo", {"dual_clip": 3.0}, -1.0, 3.0),
        ("gspo", {"clip_high": 0.2}, 1.0, -1.2),
    ],
)
def test_losses_infinite_ratio_clipped(
    name: str, kwargs: dict[str, float], advantage: float, loss: float, behaviour: float
) -> None:
    logprobs = column(-0.1).requires_grad_()
    result, stats = LOSSES[name](
        logprobs, one_token(logprobs=behaviour, advantages=advantage), **kwargs
    )
    result.backward()
    assert result.item() == pytest.approx(loss, abs=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0]]
    assert all(math.isfinite(value.item()) for value in stats.values())


@pytest.mark.parametrize(
    ("behaviour", "proximal", "current", "kwargs", "loss", "gradient", "weight", "capped"),
    [
        # Probabilities. Weight 0.4 / 0.2 = 2; ratio 0.44 / 0.4 = 1.1 within the clip: -2 * 1.1 * A
        # with A = 1.
        (0.2, 0.4, 0.44, {}, -2.2, -2.2, 2.0, 0),
        # Ratio 0.6 / 0.4 = 1.5 is clipped to 1.2: -2 * 1.2.
        (0.2, 0.4, 0.6, {}, -2.4, 0.0, 2.0, 0),
        # Weight 0.6 / 0.1 = 6 is above 5: left out, or counted as 5 with ratio 1.
        (0.1, 0.6, 0.6, {}, 0.0, 0.0, 0.0, 1),
        (0.1, 0.6, 0.6, {"importance_mode": "truncate"}, -5.0, -5.0, 5.0, 1),
        (0.1, 0.6, 0.6, {"importance_cap": None}, -6.0, -6.0, 6.0, None),
    ],
)
def test_decoupled_ppo_loss_clip_and_weight(
    behaviour: float,
    proximal: float,
    current: float,
    kwargs: dict[str, object],
    loss: float,
    gradient: float,
    weight: float,
    capped: int | None,
) -> None:
    logprobs = column(math.log(current)).requires_grad_()
    batch = one_token(
        logprobs=math.log(behaviour), prox_logprobs=math.log(proximal), advantages=1.0
    )
    result, stats = decoupled_ppo_loss(logprobs, batch, **kwargs)  # type: ignore[arg-type]
    result.backward()
    assert result.item() == pytest.approx(loss, abs=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad[0, 1].item() == pytest.approx(gradient, abs=1e-5)
    assert stats["importance_weight"].item() == pytest.approx(weight, abs=1e-5)
    assert (stats["importance_capped"].item() if "importance_capped" in stats else None) == capped


def test_decoupled_ppo_loss_one_old_policy() -> None:
    outputs, batch = full_batch()
    batch["prox_logprobs"] = batch["logprobs"]
    decoupled, stats = decoupled_ppo_loss(outputs, batch)
    plain, plain_stats = grpo_loss(outputs, batch)
    assert decoupled.item() == pytest.approx(plain.item())
    assert plain_stats.items() <= stats.items()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("num_choices", [1, 3, 7])
def test_distill_loss_equals_plain_torch(direction: str, num_choices: int) -> None:
    outputs, batch = full_batch()
    batch = with_choices(batch, num_choices)
    mask, ids = batch["loss_mask"], batch["top_ids"]

    def of_choices(logprobs: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of the choices and of all others, in float64."""
        chosen = logprobs.double().exp().gather(-1, ids)
        return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], dim=-1)

    p, q = of_choices(batch["own"]), of_choices(batch["teacher"])
    if num_choices == 7:  # there are no others, and this is the divergence itself
        p, q = p[..., :-1], q[..., :-1]
    p, q = (p, q) if direction == "reverse" else (q, p)
    divergence = ((p * (p / q).log()).sum(-1) * mask).sum().item()
    likelihood = (outputs * mask).sum().item()
    loss, stats = distill_loss(outputs, {**batch, "loss_weights": torch.ones(4)}, direction)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(divergence, abs=1e-6, rel=1e-6)
    assert stats["teacher_kl"].item() == pytest.approx(divergence, abs=1e-6, rel=1e-6)
    del batch["loss_weights"]
    loss, _ = distill_loss(outputs, batch, direction, hard=0.25)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(0.75 * divergence - 0.25 * likelihood, abs=1e-6, rel=1e-6)
    with pytest.raises(ValueError, match="no direction 'both'; expected 'reverse' or 'forward'"):
        distill_loss(outputs, batch, "both")  # type: ignore[arg-type]


def test_distill_loss_teacher_that_is_sure() -> None:
    batch = {
        "loss_mask": mask(1),
        "top_ids": torch.zeros(1, 2, 1, dtype=torch.int64),
        TEACHER: torch.zeros(1, 2, 1),
    }
    own = torch.full((1, 2, 1), -0.7).requires_grad_()
    for direction in ("reverse", "forward"):
        loss, _ = distill_loss(column(-1.0), {**batch, OWN: own}, direction)  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad(loss, own)
        assert loss.isfinite()
        assert grad[0, 1, 0] < 0
    exactly, _ = distill_loss(column(0.0), {**batch, OWN: torch.zeros(1, 2, 1)}, "reverse")
    assert exactly.item() == 0.0


@pytest.mark.parametrize("name", TOKENS)
def test_policy_losses_add_the_divergence_from_a_teacher(name: str) -> None:
    outputs, batch = full_batch()
    plain, _ = LOSSES[name](outputs, batch, **ARGUMENTS[name])
    with_teacher = with_choices(batch)
    loss, stats = LOSSES[name](outputs, with_teacher, **ARGUMENTS[name])
    weights = with_teacher["top_coef"][:, None] * batch["loss_weights"]
    weighted, _ = distill_loss(outputs, {**with_teacher, "loss_weights": weights}, "reverse")
    divergence, _ = distill_loss(
        outputs, {**with_teacher, "loss_weights": torch.ones(4)}, "reverse"
    )
    assert loss.item() == pytest.approx(plain.item() + weighted.item(), rel=1e-5)
    assert stats["teacher_kl"].item() == pytest.approx(divergence.item(), rel=1e-6)
    del with_teacher["top_coef"]
    with pytest.raises(ValueError, match=r"_loss needs the column\(s\) top_coef in every sample"):
        LOSSES[name](outputs, with_teacher, **ARGUMENTS[name])


def test_gspo_loss_sequence_ratio() -> None:
    # Ratios 2 and 0.5 of the tokens: their geometric mean is 1, so nothing is clipped however
    # narrow the clip is.
    logprobs = column(-1.0 + math.log(2), -1.0 - math.log(2)).requires_grad_()
    batch = {
        "loss_mask": mask(2),
        "logprobs": column(-1.0, -1.0),
        "advantages": torch.tensor([3.0]),
    }
    loss, stats = gspo_loss(logprobs, batch)
    loss.backward()
    # Two tokens of the ratio 1 and the advantage 3; each token's log-probability moves both by
    # half.
    assert loss.item() == pytest.approx(-6.0, abs=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -3.0, -3.0], abs=1e-5)
    assert stats["clip_fraction"].item() == 0
    # Ratios 2 and 1: the mean is sqrt(2), which is clipped to 1.0004.
    loss, stats = gspo_loss(column(-1.0 + math.log(2), -1.0), batch)
    assert loss.item() == pytest.approx(-6 * 1.0004, abs=1e-4)
    assert stats["clip_fraction"].item() == 2


def test_cispo_loss_caps_weight() -> None:
    # Ratio 6 counts as 5; the gradient of -5 * A * log p is -5 * A with A = 2.
    logprobs = column(-1.0 + math.log(6)).requires_grad_()
    loss, stats = cispo_loss(logprobs, one_token(logprobs=-1.0, advantages=2.0))
    loss.backward()
    assert loss.item() == pytest.approx(-10 * (-1.0 + math.log(6)), abs=1e-4)
    assert logprobs.grad is not None
    assert logprobs.grad[0, 1].item() == pytest.approx(-10.0)
    assert stats["clip_fraction"].item() == 1


def test_kl_estimate_mean() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    log_ratio = (p / q).log()
    divergence = (p * log_ratio).sum()
    assert (p * kl_estimate(log_ratio, "k1")).sum().item() == pytest.approx(divergence.item())
    assert (p * kl_estimate(log_ratio, "k3")).sum().item() == pytest.approx(divergence.item())
    assert (kl_estimate(log_ratio, "k3") >= 0).all()
    # k2 has half the second moment: 0.5 * (0.5 + 0.2) * log(2.5)^2
    assert (p * kl_estimate(log_ratio, "k2")).sum().item() == pytest.approx(
        0.35 * math.log(2.5) ** 2
    )
    with pytest.raises(ValueError, match="'k1', 'k2' or 'k3'"):
        kl_estimate(log_ratio, "k4")  # type: ignore[arg-type]


def test_kl_estimate_gradients() -> None:
    reference = torch.tensor([0.2, 0.3, 0.5]).log()
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    current = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad(
        (current.exp() * (current - reference)).sum(), logits, retain_graph=True
    )
    for estimator, gradient in (("k2", expected), ("k1", torch.zeros(3))):
        # The mean over tokens that the policy draws: their probabilities are not differentiated.
        mean = (current.detach().exp() * kl_estimate(current - reference, estimator)).sum()  # type: ignore[arg-type]
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(found, gradient, atol=1e-6, rtol=1e-5)


def test_grpo_loss_entropy_bonus() -> None:
    batch = one_token(logprobs=-1.0, advantages=2.0, entropy=0.7)
    loss, stats = grpo_loss(column(-1.0), batch, entropy_coef=0.1)
    assert loss.item() == pytest.approx(-2.0 - 0.07)
    assert stats["entropy"].item() == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("value", "clip", "loss", "gradient", "is_clipped"),
    [
        # The return is 2, the old value 1.
        (1.5, None, 0.125, -0.5, None),
        # Moved by 0.1, less than the clip: the value itself counts.
        (1.1, 0.2, 0.405, -0.9, 0),
        # Moved by 0.5 towards the return: counts as 1.2, 0.5 * 0.8 ^ 2, without a gradient.
        (1.5, 0.2, 0.32, 0.0, 1),
        # Moved away from the return: the larger of the two losses is that of the value itself, 0.5
        # * 1.5 ^ 2.
        (0.5, 0.2, 1.125, -1.5, 0),
    ],
)
def test_value_loss_clip(
    value: float, clip: float | None, loss: float, gradient: float, is_clipped: int | None
) -> None:
    # The value of token 1 is that of token 0, before it; that of the last token is not used.
    values = torch.tensor([[value, 99.0]], requires_grad=True)
    batch = {"loss_mask": mask(1), "returns": column(2.0), "values": torch.tensor([[1.0, -99.0]])}
    result, stats = value_loss(values, batch, clip=clip)
    result.backward()
    assert result.item() == pytest.approx(loss, abs=1e-6)
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([gradient, 0.0], abs=1e-6)
    assert (stats["value_clip_fraction"].item() if clip else None) == is_clipped
    assert stats["value"].item() == pytest.approx(value)
    assert stats["return"].item() == 2.0


def pair(
    first: list[float], second: list[float], **others: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    outputs = torch.tensor([first, second], requires_grad=True)
    return outputs, {
        "loss_mask": torch.tensor([[False, True, True]] * 2),
        "pair": torch.tensor([4, 4]),
        **others,
    }


@pytest.mark.parametrize(
    ("loss_type", "loss", "gradient"),
    [
        # Log-ratios: 0.5 + 0.5 = 1 of the preferred answer and 0 - 1 = -1 of the other; their
        # difference is 2, beta is 0.5. -log sigmoid(1) = log(1 + 1/e); its derivative is beta *
        # (sigmoid(1) - 1).
        ("sigmoid", math.log(1 + math.exp(-1)), 0.5 * (1 / (1 + math.exp(-1)) - 1)),
        # 1 - 0.5 * 2 = 0: at the hinge.
        ("hinge", 0.0, 0.0),
        # Means over two tokens: 0.5 and -0.5; (1 - 1 / (2 * 0.5)) ^ 2 = 0.
        ("ipo", 0.0, 0.0),
    ],
)
def test_dpo_loss_one_pair(loss_type: str, loss: float, gradient: float) -> None:
    reference = torch.tensor([[0.0, -2.0, -2.0], [0.0, -1.0, -1.0]])
    logprobs, batch = pair([0.0, -1.5, -1.5], [0.0, -1.0, -2.0], ref_logprobs=reference)
    result, stats = dpo_loss(logprobs, batch, beta=0.5, loss_type=loss_type)  # type: ignore[arg-type]
    result.backward()
    assert result.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, gradient, gradient], abs=1e-6)
    assert logprobs.grad[1].tolist() == pytest.approx([0.0, -gradient, -gradient], abs=1e-6)
    numbers = {name: value.item() for name, value in stats.items()}
    assert numbers == {
        "chosen_reward": 0.5,
        "rejected_reward": -0.5,
        "reward_margin": 1.0,
        "accuracy": 1.0,
    }
    with pytest.raises(ValueError, match="'sigmoid', 'ipo' or 'hinge'"):
        dpo_loss(logprobs, batch, loss_type="square")  # type: ignore[arg-type]


def test_reward_model_loss_last_token() -> None:
    values, batch = pair([9.0, 9.0, 2.0], [9.0, 1.0, 9.0], margin=torch.tensor([0.5, 7.0]))
    batch["loss_mask"][1, 2] = False
    loss, stats = reward_model_loss(values, batch, center_coef=0.1)
    loss.backward()
    # 2 - 1 - 0.5 is the argument of the sigmoid, 0.1 * (2 + 1) ^ 2 keeps the rewards around 0.
    slope = 1 / (1 + math.exp(-0.5)) - 1
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.5)) + 0.9, abs=1e-6)
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([0.0, 0.0, slope + 0.6], abs=1e-6)
    assert values.grad[1].tolist() == pytest.approx([0.0, -slope + 0.6, 0.0], abs=1e-6)
    numbers = {name: value.item() for name, value in stats.items()}
    assert numbers == {
        "chosen_reward": 2.0,
        "rejected_reward": 1.0,
        "reward_margin": 1.0,
        "accuracy": 1.0,
    }
    batch["loss_mask"][1] = False
    with pytest.raises(ValueError, match="pair\\(s\\) \\[4\\] has no token in its loss_mask"):
        reward_model_loss(values, batch)


def test_reward_model_loss_margin_per_token() -> None:
    values, batch = pair([9.0, 9.0, 2.0], [9.0, 1.0, 9.0], margin=torch.ones(2, 3))
    with pytest.raises(ValueError, match="'margin' as one number per sample; it has one per token"):
        reward_model_loss(values, batch)


@pytest.mark.parametrize("name", PAIRS)
def test_pair_losses_incomplete_pairs(name: str) -> None:
    outputs, batch = full_batch()
    batch["pair"] = torch.tensor([0, 1, 1, 2])
    with pytest.raises(ValueError, match="must be of one pair"):
        LOSSES[name](outputs, batch)
    with pytest.raises(ValueError, match="must be of one pair"):
        LOSSES[name](outputs[:1], {key: value[:1] for key, value in batch.items()})


def test_prepare_loss_unsuitable_losses() -> None:
    sample = {"input_ids": [1, 2]}
    with pytest.raises(
        ValueError,
        match=r"'value' is for a model with the head 'value'; this engine's TrainConfig.head is "
        r"'lm'",
    ):
        prepare_loss("value", None, [sample], "lm")
    with pytest.raises(
        ValueError, match="compares pairs and needs the column 'pair'.*the samples have input_ids"
    ):
        prepare_loss("dpo", None, [sample], "lm")
    assert prepare_loss("dpo", None, [], "lm").traits.paired
    with pytest.raises(ValueError, match=r"sample 7 is 1 \(type int\); expected a mapping"):
        prepare_loss("dpo", None, SampleShare([1], [7]), "lm")  # type: ignore[list-item]

    @loss_traits(needs_entropy=True)
    def greedy(
        outputs: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return outputs.sum(), {}

    assert prepare_loss(greedy, None, [sample], "lm").needs_entropy
    with pytest.raises(ValueError, match="'greedy' needs entropies"):
        prepare_loss(greedy, None, [sample], "value")


def test_prepare_loss_needs_entropy() -> None:
    assert not prepare_loss("grpo", {"clip_high": 0.28}, [], "lm").needs_entropy
    assert not prepare_loss("grpo", {"entropy_coef": 0.0}, [], "lm").needs_entropy
    assert prepare_loss("grpo", {"entropy_coef": 0.1}, [], "lm").needs_entropy
    bound = functools.partial(grpo_loss, entropy_coef=0.1, clip_high=0.3)
    call = prepare_loss(bound, {"clip_high": 0.4}, [], "lm")
    assert call.needs_entropy
    assert call.traits.head == "lm"
    assert call.kwargs == {"entropy_coef": 0.1, "clip_high": 0.4}


def test_prepare_loss_traits_pickled() -> None:
    @loss_traits(paired=True)
    def mine(
        outputs: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return outputs.sum(), {}

    assert prepare_loss(cloudpickle.loads(cloudpickle.dumps(mine)), None, [], "value").traits.paired


def test_prepare_loss_unknown_setting() -> None:
    with pytest.raises(
        ValueError, match="loss 'grpo' has no setting 'cliphigh'; did you mean 'clip_high'"
    ):
        prepare_loss("grpo", {"cliphigh": 0.3}, [], "lm")
