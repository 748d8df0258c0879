"""Test the order of rows that gives data-parallel shares equally many tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmsman.api.batch import Batch
from helmsman.api.parts import balanced_order


def tokens_of_shares(lengths: list[int], num_parts: int) -> list[int]:
    batch = Batch({"tokens": [[0] * length for length in lengths]})
    ordered = batch.reorder(balanced_order(lengths, num_parts))
    return [
        sum(len(row) for row in share["tokens"]) for share in ordered.chunk(num_parts, "uneven")
    ]


def test_balanced_order_pairs_long_with_short() -> None:
    assert balanced_order([9, 8, 1, 2], 2) == [0, 2, 1, 3]
    assert tokens_of_shares([9, 8, 1, 2], 2) == [10, 10]


def test_balanced_order_of_answers() -> None:
    """Answers have many short lengths and few long ones."""
    lengths = [int(random.Random(row).lognormvariate(6, 1)) for row in range(512)]
    shares = tokens_of_shares(lengths, 8)
    assert max(shares) <= 1.02 * sum(shares) / 8
    in_order = [sum(lengths[start : start + 64]) for start in range(0, 512, 64)]
    assert max(in_order) >= 1.1 * sum(in_order) / 8, "the given order is worse"


@given(st.lists(st.integers(0, 100)), st.integers(1, 9))
def test_balanced_order_is_permutation(lengths: list[int], num_parts: int) -> None:
    order = balanced_order(lengths, num_parts)
    assert sorted(order) == list(range(len(lengths)))
    assert order == balanced_order(lengths, num_parts)


def test_balanced_order_zero_parts() -> None:
    with pytest.raises(ValueError, match="num_parts is 0; expected 1 or more"):
        balanced_order([1], 0)
