"""Test that micro-batches keep the budget and all samples, and name malformed samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helmsman.api.engines import SampleShare
from helmsman.api.pairs import sample_units
from helmsman.engines._train.batching import (
    Batching,
    MicroBatch,
    check_samples,
    group_samples,
    make_micro_batch,
    pack,
    pad,
)


def make_micro_batches(
    samples: list[dict[str, Any]], *, max_tokens: int, vocab_size: int
) -> list[MicroBatch]:
    batching = Batching(max_tokens=max_tokens, vocab_size=vocab_size)
    checked = check_samples(samples, vocab_size)
    return [
        make_micro_batch(group, checked, batching) for group in group_samples(checked, batching)
    ]


def num_loss_tokens(batch: MicroBatch) -> int:
    return int(batch.columns["loss_mask"].sum())


@given(lengths=st.lists(st.integers(1, 30), max_size=20), max_tokens=st.integers(1, 100))
def test_group_samples_within_budget(lengths: list[int], max_tokens: int) -> None:
    samples = [{"input_ids": [index + 1] * length} for index, length in enumerate(lengths)]
    batches = make_micro_batches(samples, max_tokens=max_tokens, vocab_size=50)
    assert sorted(index for batch in batches for index in batch.indices) == list(
        range(len(lengths))
    )
    for batch in batches:
        input_ids = batch.columns["input_ids"]
        assert input_ids.numel() <= max_tokens or len(batch.indices) == 1
        for row, index, length in zip(input_ids, batch.indices, batch.lengths, strict=True):
            assert row.tolist() == [index + 1] * length + [0] * (len(row) - length)
    assert sum(map(num_loss_tokens, batches)) == sum(length - 1 for length in lengths)


def test_make_micro_batch_column_kinds() -> None:
    samples: list[dict[str, Any]] = [
        {
            "input_ids": [1, 2, 3],
            "loss_mask": [1, 0, 1],
            "logprobs": np.array([0.0, -1.0, -2.0]),
            "advantages": 0.5,
        },
        {
            "input_ids": torch.tensor([4, 5]),
            "loss_mask": [True, True],
            "logprobs": [0.0, -3.0],
            "advantages": np.float32(-1),
        },
    ]
    (batch,) = make_micro_batches(samples, max_tokens=100, vocab_size=50)
    assert batch.columns["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]
    # A first token is not predicted, so it never counts.
    assert batch.columns["loss_mask"].tolist() == [[False, False, True], [False, True, False]]
    assert batch.columns["logprobs"].tolist() == [[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]]
    assert batch.columns["logprobs"].dtype == batch.columns["advantages"].dtype == torch.float32
    assert batch.columns["advantages"].tolist() == [0.5, -1.0]
    assert num_loss_tokens(batch) == 2


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64, np.int16])
def test_make_micro_batch_integer_types(kind: type[np.integer[Any]]) -> None:
    samples = [
        {"input_ids": np.array(ids, dtype=kind), "loss_mask": np.array([0, 1], dtype=kind)}
        for ids in ([1, 2], [3, 4])
    ]
    (batch,) = make_micro_batches(samples, max_tokens=100, vocab_size=5)
    assert batch.columns["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert num_loss_tokens(batch) == 2


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (2, "sample 1 is 2 .type int.; expected a mapping"),
        ("input_ids", "sample 1 is 'input_ids' .type str."),
        ({"tokens": [1]}, "sample 1 has no 'input_ids'"),
        ({"input_ids": []}, "sample 1: 'input_ids' is"),
        ({"input_ids": [[1, 2]]}, "sample 1: 'input_ids' is"),
        (
            {"input_ids": [1, 50]},
            "sample 1: 'input_ids' has ids outside the vocabulary of size 50",
        ),
        ({"input_ids": [-1, 1]}, "outside the vocabulary"),
        ({"input_ids": [1.5]}, "sample 1: 'input_ids' is"),
        (
            {"input_ids": [1, 2, 3], "logprobs": [0.0, 1.0]},
            r"'logprobs' has the shape \(2,\); expected \(3,\)",
        ),
        ({"input_ids": [1, 2], "answer": "four"}, "'answer' .a str. is not numeric"),
        ({"input_ids": [1, 2], "loss_mask": 1}, "'loss_mask' is a scalar"),
        ({"input_ids": [1, 2], "advantages": 1.0}, "sample 1 has the entries"),
        ({"input_ids": [1, 2], "top_ids": [1, 2]}, r"'top_ids' has .* \(2,\); expected \(2, k\)"),
        (
            {"input_ids": [1, 2], "top_ids": [[1]]},
            r"'top_ids' has .* \(1, 1\); expected \(2, k",
        ),
        ({"input_ids": [1, 2], "top_ids": [[1], [50]]}, "'top_ids' has ids outside the vocabulary"),
        ({"input_ids": [1, 2], "other": [[1], [2]]}, r"'other' has .* \(2, 1\); expected \(2,\)"),
    ],
)
def test_check_samples_malformed(sample: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_micro_batches([{"input_ids": [1, 2]}, sample], max_tokens=100, vocab_size=50)


def test_check_samples_of_a_share() -> None:
    good = {"input_ids": [1, 2], "advantages": [0.0, 1.0]}
    scalar = {"input_ids": [1, 2], "advantages": 1.0}
    for bad, message in (
        ({"input_ids": [1, 50]}, "sample 7: 'input_ids' has ids outside"),
        ({"input_ids": [1]}, "sample 7 has the entries .*, but sample 3 has"),
        (scalar, "'advantages' is a scalar in sample 7, but has one entry per token in sample 3"),
    ):
        with pytest.raises(ValueError, match=message):
            check_samples(SampleShare([good, bad], [3, 7]), vocab_size=50)
    pairs = SampleShare([{"input_ids": [1], "pair": 0}, {"input_ids": [1], "pair": 1.5j}], [3, 7])
    with pytest.raises(ValueError, match="sample 7: 'pair' is 1.5j"):
        sample_units(pairs)


def test_make_micro_batch_mixed_numbers() -> None:
    """The order in a micro-batch does not matter."""
    whole = {"input_ids": [1, 2, 3], "returns": [0, 0, 1], "advantages": 2}
    parts = {"input_ids": [4, 5], "returns": [0.5, 0.75], "advantages": -0.25}
    for samples in ([whole, parts], [parts, whole]):
        (batch,) = make_micro_batches(samples, max_tokens=100, vocab_size=50)
        assert batch.columns["returns"].tolist() == [[0, 0, 1], [0.5, 0.75, 0]]
        assert batch.columns["advantages"].tolist() == [2, -0.25]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_check_samples_mixed_column_shapes(order: tuple[int, int]) -> None:
    samples = [
        {"input_ids": [1, 2], "advantages": 1.0},
        {"input_ids": [1, 2], "advantages": [0.0, 1.0]},
    ]
    message = (
        f"'advantages' is a scalar in sample {order[0]}, but has one entry per token in "
        f"sample {order[1]}"
    )
    with pytest.raises(ValueError, match=message):
        make_micro_batches([samples[index] for index in order], max_tokens=100, vocab_size=50)


@pytest.mark.parametrize("max_tokens", [1, 12, 30, 1000])
def test_group_samples_keeps_pairs(max_tokens: int) -> None:
    order, lengths = [5, 8, 5, 2, 8, 2], [3, 9, 4, 2, 1, 6]
    samples = [
        {"input_ids": [1] * length, "pair": number}
        for length, number in zip(lengths, order, strict=True)
    ]
    batches = make_micro_batches(samples, max_tokens=max_tokens, vocab_size=2)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(6))
    for batch in batches:
        rows = batch.columns["input_ids"]
        assert len(batch.indices) == 2 or rows.numel() <= max_tokens
        for first, second in zip(batch.indices[::2], batch.indices[1::2], strict=True):
            assert order[first] == order[second]
            assert first < second
        assert torch.equal(batch.columns["pair"][0::2], batch.columns["pair"][1::2])


def test_group_samples_incomplete_pair() -> None:
    with pytest.raises(ValueError, match=r"pair 4 has 1 sample\(s\) \(0\)"):
        make_micro_batches([{"input_ids": [1], "pair": 4}], max_tokens=10, vocab_size=2)


def test_check_samples_numbers_of_choices() -> None:
    one, two = ({"input_ids": [1, 2], "top_ids": [[3] * k, [4] * k]} for k in (1, 2))
    with pytest.raises(
        ValueError, match="'top_ids' has 2 choices per token in sample 9, but 1 in sample 8"
    ):
        check_samples(SampleShare([one, two], [8, 9]), vocab_size=50)


@pytest.mark.parametrize("layout", [pad, pack])
def test_choices_go_before_their_tokens_and_back(layout: Any) -> None:
    rows = layout([torch.arange(length) for length in (3, 1, 4)], 5)
    column = torch.arange(1, 25).view(3, 4, 2)  # of three samples, padded to 4 tokens
    moved = rows.to_predictions(column)
    assert moved.shape == (*rows.input_ids.shape, 2)
    # Token 1 of the first sample is predicted at its token 0.
    assert moved[0, 0].tolist() == column[0, 1].tolist()
    back = rows.per_prediction(moved)
    kept = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]])[..., None]
    assert torch.equal(back, column * kept)
