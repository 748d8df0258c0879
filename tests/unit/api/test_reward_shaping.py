"""Test shaped rewards against values computed by hand."""

from __future__ import annotations

import math

import pytest

from helmsman.api.reward_shaping import (
    AdaptiveKl,
    overlong_filter,
    soft_overlong_punishment,
    token_rewards,
)

MASK = [False, True, False, True]


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [("k1", 0.5, -1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) + 0.5 - 1, math.exp(1) - 1 - 1)],
)
def test_token_rewards(estimator: str, first: float, second: float) -> None:
    rewards, divergence = token_rewards(
        [3.0],
        [MASK],
        [[9, -1.0, 9, -2.0]],
        [[0, -1.5, 0, -1.0]],
        kl_coef=0.1,
        estimator=estimator,  # type: ignore[arg-type]
    )
    assert rewards == [[0, pytest.approx(-0.1 * first), 0, pytest.approx(3 - 0.1 * second)]]
    assert divergence == pytest.approx(first + second)


def test_token_rewards_without_divergence() -> None:
    assert token_rewards([3.0, 4.0], [MASK, [True, False]]) == ([[0, 0, 0, 3], [0, 0]], 0)


@pytest.mark.parametrize(
    ("arguments", "kwargs", "message"),
    [
        (([1.0], [MASK]), {"kl_coef": 0.1}, "needs logprobs and ref_logprobs"),
        (([1.0], [MASK, MASK]), {}, "1 scores for 2 samples"),
        (([1.0], [MASK], [], [[0.0] * 4]), {"kl_coef": 0.1}, "0 rows of logprobs for 1 samples"),
        (
            ([1.0], [MASK], [[0.0] * 4], [[0.0] * 4] * 2),
            {"kl_coef": 0.1},
            "2 rows of ref_logprobs for 1 samples",
        ),
        (
            ([1.0], [MASK], [[0.0] * 4], [[0.0] * 3]),
            {"kl_coef": 0.1},
            "sample 0 has 4 logprobs, 3 ref_logprobs, 4 tokens",
        ),
        (([1.0], [MASK]), {"estimator": "k4"}, "'k1', 'k2' or 'k3'"),
    ],
)
def test_token_rewards_invalid_arguments(
    arguments: tuple[object, ...], kwargs: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        token_rewards(*arguments, **kwargs)  # type: ignore[arg-type]


def test_adaptive_kl() -> None:
    control = AdaptiveKl(1.0, target=6.0)
    # The error of 9 is clipped to 0.2 and multiplied by the gain 0.1.
    assert control.update(60.0) == pytest.approx(1.02)
    assert control.update(0.0) == pytest.approx(1.02 * 0.98)
    assert control.update(6.6) == pytest.approx(1.02 * 0.98 * 1.01)  # an error of 0.1
    assert control.coef == control.update(6.0)
    with pytest.raises(ValueError, match="above 0"):
        AdaptiveKl(0.0, target=6.0)


def test_soft_overlong_punishment() -> None:
    # The punishment is 0 up to 8 tokens and -1 from 12 tokens, and grows linearly in between.
    found = [
        soft_overlong_punishment(length, max_tokens=12, cache_tokens=4)
        for length in (0, 8, 9, 11, 12, 40)
    ]
    assert found == [0, 0, -0.25, -0.75, -1, -1]
    with pytest.raises(ValueError, match="1 to max_tokens"):
        soft_overlong_punishment(3, max_tokens=12, cache_tokens=0)


def test_overlong_filter() -> None:
    nothing = [False] * 4
    assert overlong_filter([MASK] * 3, ["stop", "length", "abort"]) == [MASK, nothing, nothing]
    with pytest.raises(ValueError, match="1 stop reasons for 2 samples"):
        overlong_filter([MASK] * 2, ["stop"])
