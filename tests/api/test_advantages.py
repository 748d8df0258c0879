"""Advantages and weights against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from helmsman.api.advantages import group_advantages, sequence_weights

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("rewards", "kwargs", "expected"),
    [
        # mean 0.5, unbiased std sqrt(1/2); then equal rewards
        ([1, 0, 3, 3], {"group_size": 2}, [HALF, -HALF, 0, 0]),
        # mean 2, unbiased std sqrt((1 + 0 + 1) / 2) = 1
        ([1, 2, 3], {"group_size": 3}, [-1, 0, 1]),
        ([1, 0, 3, 2], {"group_size": 2, "normalize_std": False}, [0.5, -0.5, 0.5, -0.5]),
        ([1, 3, 0, 2], {"group_ids": ["a", "b", "a", "b"], "normalize_std": False}, [0.5, 0.5, -0.5, -0.5]),
        ([7], {"group_size": 1}, [0]),
        ([], {"group_size": 4}, []),
    ],
)
def test_group_advantages(rewards: list[float], kwargs: dict[str, object], expected: list[float]) -> None:
    assert group_advantages(rewards, **kwargs) == pytest.approx(expected, abs=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "either group_size or group_ids"),
        ({"group_size": 3, "group_ids": [0, 0]}, "either group_size or group_ids"),
        ({"group_size": 3}, "2 rewards do not make groups of 3"),
        ({"group_ids": [0]}, "1 group ids for 2 rewards"),
    ],
)
def test_group_advantages_says_what_does_not_fit(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages([0.0, 1.0], **kwargs)  # type: ignore[arg-type]


def test_sequence_weights_turn_the_mean_over_tokens_into_the_other_means() -> None:
    num_tokens, losses = [1, 3], [[5.0], [1.0, 2.0, 3.0]]

    def mean(weights: list[float]) -> float:
        return sum(w * x for w, row in zip(weights, losses, strict=True) for x in row) / sum(num_tokens)

    assert mean(sequence_weights(num_tokens, "token")) == pytest.approx(11 / 4)
    assert mean(sequence_weights(num_tokens, "sequence")) == pytest.approx((5 + 2) / 2)
    assert mean(sequence_weights(num_tokens, "constant", max_tokens=10)) == pytest.approx((0.5 + 0.6) / 2)


def test_sequence_weights_of_an_empty_sequence_is_zero() -> None:
    assert sequence_weights([0, 2], "sequence") == [0.0, 0.5]


def test_sequence_weights_needs_the_constant() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        sequence_weights([1], "constant")
    with pytest.raises(ValueError, match="expected 'token'"):
        sequence_weights([1], "median")  # type: ignore[arg-type]
