"""Test how answers of the GRPO recipe become samples and metrics."""

from __future__ import annotations

import math

import msgspec
import pytest

from helmsman import GenerationResult
from helmsman.api.generation import StopReason
from helmsman.recipes.answers import single_sample
from helmsman.recipes.batches import (
    Answer,
    Group,
    logprob_differences,
    loss_arguments,
    make_samples,
    overlong_cost,
    rollout_metrics,
    train_metrics,
    with_weights,
)
from helmsman.recipes.prompts import Draw, Row
from helmsman.recipes.scorer import Failure, Scored
from tests.unit.recipes.data import settings


def answer(
    tokens: list[int], reward: float, *, version: int = 3, stop: StopReason = "stop"
) -> Answer:
    result = GenerationResult(
        request_id="",
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens),
        versions=[version] * len(tokens),
        stop_reason=stop,
    )
    sample = single_sample([8, 9], result, reward)
    return Answer([sample], Scored({"exact": reward}, reward), reward)


def group(*answers: Answer) -> Group:
    return Group(Draw(0, Row([8, 9], "", "", "", {}), []), list(answers))


GROUPS = [
    group(answer([1, 2], 1.0), answer([3, 4, 5, 6], 0.0, version=2, stop="length")),
    group(answer([1], 0.5), answer([2, 2], 0.5)),
]


def test_make_samples_masks_and_advantages() -> None:
    samples = make_samples(
        GROUPS, settings(("samples_per_prompt", "2"), ("algorithm.preset", "dr_grpo"))
    )
    assert samples[0] == {
        "input_ids": [8, 9, 1, 2],
        "loss_mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.5, -0.5],
        "advantages": 0.5,
    }
    assert [sample["advantages"] for sample in samples] == [0.5, -0.5, 0.0, 0.0]


def test_make_samples_overlong_filter() -> None:
    dapo = settings(("samples_per_prompt", "2"), ("algorithm.preset", "dapo"))
    assert [sum(sample["loss_mask"]) for sample in make_samples(GROUPS, dapo)] == [2, 0, 1, 2]
    assert loss_arguments(dapo.algorithm) == {"clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("preset", "weights"),
    [("grpo", [9 / 8, 9 / 16, 9 / 4, 9 / 8]), ("dr_grpo", [9 / 64] * 4), ("dapo", [1.0] * 4)],
)
def test_with_weights_of_presets(preset: str, weights: list[float]) -> None:
    found = settings(
        ("samples_per_prompt", "2"),
        ("algorithm.preset", preset),
        ("algorithm.overlong_filter", "false"),
    )
    samples = with_weights(make_samples(GROUPS, found), found)
    assert [sample["loss_weights"] for sample in samples] == pytest.approx(weights)


def test_overlong_cost() -> None:
    algorithm = settings(
        ("algorithm.overlong_buffer", "4"), ("algorithm.overlong_penalty", "0.5")
    ).algorithm
    assert [overlong_cost(length, algorithm, 16) for length in (1, 12, 14, 16)] == [0, 0, 0.25, 0.5]


def test_rollout_metrics() -> None:
    found = rollout_metrics(GROUPS, 3, settings())
    assert found["reward/mean"] == 0.5
    assert (found["response_length/mean"], found["response_length/max"]) == (2.25, 4.0)
    assert found["response_length/truncated"] == 0.25
    assert found["groups/uniform"] == 0.5
    assert found["accuracy"] == 0.25
    assert found["staleness/mean"] == pytest.approx(4 / 9)
    assert found["staleness/max"] == 1.0


def test_group_without_failed_answers() -> None:
    """The mean and deviation of a group are those of the answers that have a reward."""
    failed = msgspec.structs.replace(
        answer([1], math.nan), scored=Scored({}, math.nan, (Failure("exact", "lost"),))
    )
    left = group(answer([1], 1.0), failed, answer([2], 0.0)).scored
    found = settings(("samples_per_prompt", "3"), ("algorithm.preset", "dr_grpo"))
    advantages = [each["advantages"] for each in make_samples([left, *GROUPS], found)]
    assert advantages == [0.5, -0.5, 0.5, -0.5, 0.0, 0.0]


def test_rollout_metrics_of_rewards_for_some_rows() -> None:
    both, other = Scored({"exact": 0.5, "judge": 1.0}, 1.5), Scored({"judge": 0.0}, 0.0)
    one, two = (
        msgspec.structs.replace(answer([1], each.total), scored=each) for each in (both, other)
    )
    half = settings(("evaluation.right_from", "0.5"))
    found = rollout_metrics([group(one, two)], 3, half)
    assert (found["accuracy"], found["reward/mean"]) == (1.0, 0.75)
    assert (found["reward/exact/mean"], found["reward/judge/mean"]) == (0.5, 0.5)
    assert "accuracy" not in rollout_metrics([group(two, two)], 3, half)


def test_logprob_differences_of_same_version() -> None:
    torch = pytest.importorskip("torch")
    samples = [each.samples[0] for one in GROUPS for each in one.answers]
    own = [torch.zeros(len(each.input_ids)) for each in samples]
    own[0][2:] = torch.tensor([-0.5, -0.75])
    own[2][2:], own[3][2:] = -0.5, -0.5
    found = logprob_differences(samples, own, 3)
    assert found == {"logprob_diff/max": 0.25, "logprob_diff/mean": pytest.approx(0.05)}
    assert logprob_differences(samples, own, 9) == {}


def test_train_metrics_mean_by_tokens() -> None:
    every = [
        {"loss": 1.0, "ref_kl": 0.5, "grad_norm": 1.0, "lr": 1.0, "num_tokens": 30.0},
        {"loss": 3.0, "ref_kl": 0.5, "grad_norm": 1.0, "lr": 2.0, "num_tokens": 10.0},
    ]
    assert train_metrics(every) == {
        "loss": 1.5,
        "kl": 0.5,
        "grad_norm": 1.0,
        "lr": 2.0,
        "num_tokens": 40.0,
        "optimizer_steps": 2.0,
    }
    assert train_metrics([]) == {"optimizer_steps": 0.0}
