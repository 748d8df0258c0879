"""Test importance weights against a restatement of their formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from helmsman import TrainController
from helmsman.agents.samples import Sample
from helmsman.api.corrections import Correction
from helmsman.engines.losses.corrections import importance_weights
from helmsman.engines.losses.policy import grpo_loss
from helmsman.recipes.batches import (
    Answer,
    Group,
    add_corrections,
    add_logprobs,
    with_weights,
)
from helmsman.recipes.scorer import Scored
from helmsman.recipes.settings import Algorithm, Data, GRPOSettings, Tracking

ROLLOUT = [0.0, -1.0, -2.0, -0.5, -3.0, -0.1]
TRAINER = [0.0, -0.2, -2.1, -2.5, -2.9, -0.1]
MASK = [0, 1, 1, 1, 0, 1]


def restated(correction: Correction) -> tuple[list[float], float, bool]:
    """Return weights, the number of cut tokens, and whether the answer is left out."""
    apart = [t - r for t, r, kept in zip(TRAINER, ROLLOUT, MASK, strict=True) if kept]
    logs = {
        "token": apart,
        "sequence": [sum(apart)] * len(apart),
        "geometric": [sum(apart) / len(apart)] * len(apart),
    }[correction.level]
    weights, cut = [], 0
    for each in map(math.exp, logs):
        is_in = correction.low <= each <= correction.high
        cut += not is_in
        weights.append(
            {
                "truncate": min(each, correction.high),
                "mask": each if is_in else 0.0,
                "reject": float(is_in),
            }[correction.mode]
        )
    most = correction.outlier or math.inf
    is_left_out = any(not 1 / most <= math.exp(each) <= most for each in apart)
    chosen = iter([0.0] * len(weights) if is_left_out else weights)
    return [next(chosen) if kept else 0.0 for kept in MASK], float(cut), is_left_out


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(
    "band",
    [
        {"mode": "truncate", "high": 1.5},
        {"mode": "mask", "low": 0.5, "high": 5.0},
        {"mode": "reject", "low": 0.9, "high": 1.5},
        {"mode": "mask", "low": 0.1, "high": 5.0, "outlier": 7.0},
        {"mode": "truncate", "high": 9.0, "outlier": 8.0},
    ],
    ids=lambda band: "-".join(str(each) for each in band.values()),
)
def test_weights_equal_restatement(level: Any, band: dict[str, Any]) -> None:
    correction = Correction(level=level, **band)
    columns = (torch.tensor(ROLLOUT), torch.tensor(TRAINER), torch.tensor(MASK))
    weights, stats = importance_weights(*columns, correction)
    expected, cut, is_left_out = restated(correction)
    torch.testing.assert_close(weights, torch.tensor(expected), atol=1e-6, rtol=1e-6)
    assert weights.dtype == torch.float32
    assert (stats["cut"], stats["left_out"]) == (cut, float(is_left_out))
    assert stats["weight"] == pytest.approx(sum(expected), abs=1e-5)


def test_weights_stay_finite_and_outside_the_mask_zero() -> None:
    rollout = torch.tensor([-math.inf, -900.0, -1.0])
    trainer = torch.tensor([0.0, 0.0, -math.inf])
    correction = Correction(mode="truncate", high=2.0, level="sequence")
    for mask in ([0, 1, 0], [0, 1, 1]):
        weights, stats = importance_weights(rollout, trainer, torch.tensor(mask), correction)
        assert torch.isfinite(weights).all()
        assert all(map(math.isfinite, stats.values()))
        assert weights[0] == 0


def test_samples_get_weights_and_statistics() -> None:
    samples = [
        {"input_ids": [1] * 6, "loss_mask": MASK, "logprobs": ROLLOUT, "advantages": 1.0},
        {"input_ids": [1] * 6, "loss_mask": MASK, "logprobs": TRAINER, "advantages": 1.0},
    ]
    correction = Correction(mode="mask", low=0.5, high=2.0, outlier=3.0)
    found = add_corrections(samples, [torch.tensor(TRAINER)] * 2, correction)
    # e^-2 is an outlier of the first answer; the second one has equal probabilities
    assert found["correction/left_out"] == 0.5
    assert found["correction/weight"] == pytest.approx(0.5)
    assert found["correction/cut"] == pytest.approx(2 / 8)
    settings = GRPOSettings(
        model="m", data=Data(train="rows"), algorithm=Algorithm(aggregation="token")
    )
    weighted = with_weights(samples, settings)
    # an answer that is left out does not count in the mean over tokens
    assert [each["loss_mask"] for each in weighted] == [[0] * 6, MASK]
    assert weighted[1]["loss_weights"] == pytest.approx(1.0)


def test_losses_weigh_tokens_and_not_regularizers() -> None:
    mask = torch.tensor([MASK]).bool()
    batch = {
        "loss_mask": mask,
        "logprobs": torch.tensor([ROLLOUT]),
        "ref_logprobs": torch.tensor([ROLLOUT]),
        "advantages": torch.ones(1),
    }
    now = torch.tensor([TRAINER])
    importance = torch.tensor([[9.0, 2.0, 0.0, 1.0, 9.0, 0.5]])
    plain, _ = grpo_loss(now, batch, kl_coef=0.0)
    regularized, stats = grpo_loss(now, batch, kl_coef=0.5)
    weighted, _ = grpo_loss(now, {**batch, "importance": importance}, kl_coef=0.5)
    ratio = (now - batch["logprobs"]).exp()
    objective = -torch.minimum(ratio, ratio.clamp(0.8, 1.2))
    expected = (objective * importance)[mask].sum() + 0.5 * stats["ref_kl"]
    torch.testing.assert_close(weighted, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(regularized, plain + 0.5 * stats["ref_kl"], atol=1e-6, rtol=1e-6)


class Trainer(TrainController):
    """A policy that gives each sample the log-probabilities of TRAINER."""

    def __init__(self) -> None:
        """Start nothing."""

    def forward(
        self,
        samples: Sequence[Mapping[str, Any]],
        timeout: float | None = None,
        *,
        base: bool = False,
    ) -> list[Any]:
        return [torch.tensor(TRAINER)] * len(samples)

    def get_version(self) -> int:
        return 0


def answered(logprobs: list[float]) -> Sample:
    return Sample(
        input_ids=[1] * 6,
        loss_mask=MASK,
        logprobs=logprobs,
        versions=[-1] * 6,
        turn_ends=[6],
        turn_rewards=[0.0],
        reward=0.0,
        session_id="",
    )


def test_outlier_without_mode() -> None:
    """The outlier mask stands beside any mode; with 'none' the log-probabilities stay."""
    samples: list[dict[str, Any]] = [
        {"input_ids": [1] * 6, "loss_mask": MASK, "logprobs": each, "advantages": 1.0}
        for each in (ROLLOUT, TRAINER)
    ]
    settings = GRPOSettings(
        model="m",
        data=Data(train="rows"),
        algorithm=Algorithm(old_logprobs="rollout"),
        correction=Correction(outlier=3.0),
        tracking=Tracking(logprob_diff=False),
    )
    drawn: Any = None
    answers = [Answer([answered(each)], Scored({}, 0.0), 0.0) for each in (ROLLOUT, TRAINER)]
    found = add_logprobs(samples, [Group(drawn, answers)], Trainer(), settings)
    assert found["correction/left_out"] == 0.5
    assert samples[0]["importance"].tolist() == [0.0] * 6
    assert samples[1]["importance"].tolist() == [float(each) for each in MASK]
    assert samples[0]["logprobs"] == ROLLOUT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low": 2.0}, "low is 2.0 and high is 2.0; expected low below high"),
        ({"mode": "truncate", "low": 0.5}, "mode 'truncate' has a cap only"),
    ],
)
def test_empty_band_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Correction(**fields)
