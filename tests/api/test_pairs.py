"""Test that paired samples are found and stay together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helmsman.api.pairs import pair_samples, sample_units


def test_pair_samples_numbers_neighbours() -> None:
    samples = pair_samples(
        [({"input_ids": [1]}, {"input_ids": [2]}), ({"input_ids": [3]}, {"input_ids": [4]})]
    )
    assert [(sample["input_ids"], sample["pair"]) for sample in samples] == [
        ([1], 0),
        ([2], 0),
        ([3], 1),
        ([4], 1),
    ]
    assert sample_units(samples) == [(0, 1), (2, 3)]


def test_sample_units_pairs_anywhere() -> None:
    assert sample_units([{"pair": number} for number in (7, 3, 3, torch.tensor(7))]) == [
        (0, 3),
        (1, 2),
    ]


def test_sample_units_without_pairs() -> None:
    assert sample_units([{"input_ids": [1]}] * 3) == [(0,), (1,), (2,)]
    assert sample_units([]) == []


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([1, 1, 1], r"pair 1 has 3 sample\(s\) \(0, 1, 2\)"),
        ([1, 2, 2], r"pair 1 has 1 sample\(s\) \(0\)"),
        (["x", "x"], "sample 0: 'pair' is 'x'; expected one integer"),
        ([torch.tensor([1, 2])] * 2, "sample 0: 'pair' is .*; expected one integer"),
    ],
)
def test_sample_units_invalid_pairs(pairs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_units([{"pair": number} for number in pairs])
