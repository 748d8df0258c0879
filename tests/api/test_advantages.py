"""Test advantages and weights against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmsman.api.advantages import gae, group_advantages, sequence_weights, whiten

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("rewards", "kwargs", "expected"),
    [
        # mean 0.5, unbiased std sqrt(1/2); then equal rewards
        ([1, 0, 3, 3], {"group_size": 2}, [HALF, -HALF, 0, 0]),
        # mean 2, unbiased std sqrt((1 + 0 + 1) / 2) = 1
        ([1, 2, 3], {"group_size": 3}, [-1, 0, 1]),
        ([1, 0, 3, 2], {"group_size": 2, "normalize_std": False}, [0.5, -0.5, 0.5, -0.5]),
        (
            [1, 3, 0, 2],
            {"group_ids": ["a", "b", "a", "b"], "normalize_std": False},
            [0.5, 0.5, -0.5, -0.5],
        ),
        ([7], {"group_size": 1}, [0]),
        ([], {"group_size": 4}, []),
    ],
)
def test_group_advantages(
    rewards: list[float], kwargs: dict[str, object], expected: list[float]
) -> None:
    assert group_advantages(rewards, **kwargs) == pytest.approx(expected, abs=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "either group_size or group_ids"),
        ({"group_size": 3, "group_ids": [0, 0]}, "either group_size or group_ids"),
        ({"group_size": 3}, "2 rewards cannot be divided into groups of 3"),
        ({"group_ids": [0]}, "1 group ids for 2 rewards"),
    ],
)
def test_group_advantages_invalid(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages([0.0, 1.0], **kwargs)  # type: ignore[arg-type]


def test_sequence_weights() -> None:
    num_tokens, losses = [1, 3], [[5.0], [1.0, 2.0, 3.0]]

    def mean(weights: list[float]) -> float:
        return sum(w * x for w, row in zip(weights, losses, strict=True) for x in row) / sum(
            num_tokens
        )

    assert mean(sequence_weights(num_tokens, "token")) == pytest.approx(11 / 4)
    assert mean(sequence_weights(num_tokens, "sequence")) == pytest.approx((5 + 2) / 2)
    assert mean(sequence_weights(num_tokens, "constant", max_tokens=10)) == pytest.approx(
        (0.5 + 0.6) / 2
    )


def test_sequence_weights_edge_cases() -> None:
    assert sequence_weights([0, 2], "sequence") == [0.0, 0.5]
    with pytest.raises(ValueError, match="max_tokens"):
        sequence_weights([1], "constant")
    with pytest.raises(ValueError, match="expected 'token'"):
        sequence_weights([1], "median")  # type: ignore[arg-type]


def test_gae_episode() -> None:
    # Tokens 1 to 3 are chosen; values of the states before them are 1, 2, 3 (entries 0 to 2), gamma
    # 0.5, lambda 0.5. t=3: 4 + 0 - 3 = 1;  t=2: 0 + 0.5 * 3 - 2 = -0.5, plus 0.25 * 1 = -0.25;
    # t=1: 1 + 0.5 * 2 - 1 = 1, plus 0.25 * -0.25.
    advantages, returns = gae(
        [[9, 1, 0, 4]], [[1, 2, 3, 8]], [[True, True, True, True]], gamma=0.5, lam=0.5
    )
    assert advantages == [[0, 0.9375, -0.25, 1]]
    assert returns == [[0, 1.9375, 1.75, 4]]


def test_gae_truncated_episode() -> None:
    # 4 + 0.5 * 8 - 3
    advantages, _ = gae([[0, 4]], [[3, 8]], [[False, True]], gamma=0.5, truncated=[True])
    assert advantages == [[0, 5]]


def test_gae_outside_mask() -> None:
    # Of two turns: tokens 1 and 4. Before token 4 the value is 6, which is what token 1 leads to.
    rewards = [[0, 1, 0, 0, 2]]
    values = [[3, 0, 0, 6, 0]]
    masks = [[False, True, False, False, True]]
    advantages, returns = gae(rewards, values, masks, lam=0.5)
    assert advantages == [[0, 1 + 6 - 3 + 0.5 * (2 - 6), 0, 0, 2 - 6]]
    assert returns == [[0, 5, 0, 0, 2]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.5, 0.7)])
def test_gae_equals_paper(gamma: float, lam: float) -> None:
    """The reference is arXiv:1506.02438 eq. 16: a double sum over the errors of one step."""
    random = np.random.default_rng(1)
    lengths = [1, 2, 7, 12]
    rewards, values = ([random.normal(size=length) for length in lengths] for _ in range(2))
    masks = [random.random(length) < 0.7 for length in lengths]
    advantages, returns = gae(rewards, values, masks, gamma=gamma, lam=lam)  # type: ignore[arg-type]
    for row, reward, value, mask in zip(advantages, rewards, values, masks, strict=True):
        steps = [t for t in range(1, len(mask)) if mask[t]]
        states = [value[t - 1] for t in steps] + [0.0]
        errors = [reward[t] + gamma * states[i + 1] - states[i] for i, t in enumerate(steps)]
        expected = np.zeros(len(mask))
        for i, t in enumerate(steps):
            expected[t] = sum((gamma * lam) ** k * error for k, error in enumerate(errors[i:]))
        np.testing.assert_allclose(row, expected, atol=1e-12)
    if lam == 1.0:  # eq. 18: with lambda 1 the critic learns the discounted sum of rewards
        steps = [t for t in range(1, lengths[-1]) if masks[-1][t]]
        assert returns[-1][steps[0]] == pytest.approx(
            sum(gamma**k * rewards[-1][t] for k, t in enumerate(steps))
        )


def test_gae_of_tensors() -> None:
    tensors = [torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.0]), torch.tensor([False, True])]
    assert gae(*([tensor] for tensor in tensors)) == ([[0.0, 0.5]], [[0.0, 1.0]])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0, 1]], [[0, 1], [0, 1]], [[True, True]]), "1 rows of rewards, 2 of values, 1 masks"),
        (([[0, 1]], [[0]], [[True, True]]), "sample 0 has 2 rewards, 1 values, 2 tokens"),
    ],
)
def test_gae_invalid(arguments: tuple[list[list[float]], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gae(*arguments)  # type: ignore[arg-type]


def test_whiten() -> None:
    # 1, 2 and 3 count: mean 2, unbiased variance 1.
    rows, masks = [[50, 1, 70], [9, 3, 2]], [[True, True, False], [False, True, True]]
    assert whiten(rows, masks) == [
        [0, pytest.approx(-1), 0],
        [0, pytest.approx(1), pytest.approx(0)],
    ]
    assert whiten(rows, masks, shift_mean=False) == [
        [0, pytest.approx(1), 0],
        [0, pytest.approx(3), pytest.approx(2)],
    ]
    with pytest.raises(ValueError, match="1 token"):
        whiten([[1, 2]], [[True, True]])
    with pytest.raises(ValueError, match="1 rows for 2 masks"):
        whiten([[1, 2]], [[True, True], [True, True]])
    with pytest.raises(ValueError, match="sample 1: its row has 1 numbers, but its mask 2 tokens"):
        whiten([[1, 2], [3]], [[True, True], [True, True]])
