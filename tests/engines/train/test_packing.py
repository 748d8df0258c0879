"""Test that values of the model's rows return to their samples, packed or padded."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helmsman.engines._train.attention import RowShape, row_attention
from helmsman.engines._train.batching import (
    Batching,
    check_samples,
    empty_micro_batch,
    group_samples,
    in_one_piece,
    make_micro_batch,
    pack,
    pad,
)

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(lengths=LENGTHS, multiple=st.integers(1, 4), packing=st.booleans())
def test_pack_per_token_inverse(lengths: list[int], multiple: int, packing: bool) -> None:
    numbers = iter(range(1, sum(lengths) + 1))
    samples = [torch.tensor(list(itertools.islice(numbers, length))) for length in lengths]
    rows = (pack if packing else pad)(samples, multiple)
    assert rows.input_ids.shape == rows.position_ids.shape == rows.next_ids.shape
    assert rows.input_ids.shape[0] == (1 if packing else len(lengths))
    assert rows.input_ids.shape[1] % multiple == 0
    if packing:
        assert rows.segments is not None
        assert sum(rows.segments) == rows.input_ids.shape[1] < sum(lengths) + multiple
    at, before = rows.per_token(rows.input_ids.float()), rows.per_prediction(rows.next_ids.float())
    assert at.shape == before.shape == (len(lengths), max(lengths))
    positions = rows.per_token(rows.position_ids.float())
    for row, sample in enumerate(samples):
        length = len(sample)
        assert at[row, :length].tolist() == sample.tolist()
        # The next token of the previous position is the token itself; the first is not predicted.
        assert before[row, :length].tolist() == [0, *sample.tolist()[1:]]
        assert positions[row, :length].tolist() == list(range(length))
        assert not at[row, length:].any()
        assert not before[row, length:].any()


@given(lengths=LENGTHS, max_tokens=st.integers(1, 100), at_least=st.integers(0, 12))
def test_group_samples_packed_budget(lengths: list[int], max_tokens: int, at_least: int) -> None:
    batching = Batching(max_tokens=max_tokens, vocab_size=50, packing=True)
    samples = check_samples([{"input_ids": [1] * length} for length in lengths], 50)
    fewest = group_samples(samples, batching)
    groups = group_samples(samples, batching, at_least=at_least)
    for found in (fewest, groups):
        assert sorted(itertools.chain(*found)) == list(range(len(lengths)))
        assert all(
            sum(lengths[index] for index in group) <= max_tokens or len(group) == 1
            for group in found
        )
        assert all(found)
    assert len(fewest) <= len(groups) <= max(len(fewest), min(at_least, len(lengths)))
    assert group_samples(list(samples), batching, at_least=at_least) == groups


def test_group_samples_at_least() -> None:
    batching = Batching(max_tokens=100, vocab_size=50, packing=True)
    samples = check_samples([{"input_ids": [1] * 10} for _ in range(8)], 50)
    assert [len(group) for group in group_samples(samples, batching)] == [8]
    assert [len(group) for group in group_samples(samples, batching, at_least=4)] == [2, 2, 2, 2]
    assert len(make_micro_batch([0, 1], samples, batching).rows.input_ids[0]) == 20


@pytest.mark.parametrize("packing", [True, False])
def test_empty_micro_batch_counts_nothing(packing: bool) -> None:
    stand_in = empty_micro_batch(Batching(max_tokens=8, vocab_size=50, packing=packing, multiple=4))
    assert stand_in.indices == stand_in.lengths == ()
    assert not stand_in.columns["loss_mask"].any()
    assert stand_in.rows.input_ids.shape[1] == 4


def test_in_one_piece_every_dtype_and_shape() -> None:
    tensors = [
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.float64),
        torch.empty(0, 3),
        torch.tensor(7),
        torch.arange(12, dtype=torch.int32).reshape(3, 4).t(),
        torch.arange(3, dtype=torch.bfloat16),
    ]
    moves: list[torch.Tensor] = []

    def move(buffer: torch.Tensor) -> torch.Tensor:
        moves.append(buffer)
        return buffer.clone()

    moved = in_one_piece(tensors, move, pinned=False)
    assert len(moves) == 1
    for tensor, other in zip(tensors, moved, strict=True):
        assert other.dtype == tensor.dtype and torch.equal(other, tensor)
        assert other.numel() == 0 or other.is_contiguous()


@settings(max_examples=30)
@given(lengths=LENGTHS, window=st.none() | st.integers(1, 12), num_groups=st.sampled_from([1, 2]))
def test_row_attention_within_samples(
    lengths: list[int], window: int | None, num_groups: int
) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    num_tokens = sum(lengths)
    query = torch.randn(1, 4, num_tokens, 8, generator=generator)
    key, value = torch.randn(2, 1, 4 // num_groups, num_tokens, 8, generator=generator).unbind()
    shape = RowShape(tuple(lengths), None, torch.device("cpu"))
    mixed, _ = row_attention(
        torch.nn.Module(), query, key, value, None, sliding_window=window, helmsman_rows=shape
    )
    sample = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)[None]
    seen = (sample[:, None] == sample[None]) & (distance >= 0) & (distance < (window or num_tokens))
    scores = query @ key.repeat_interleave(num_groups, 1).transpose(-1, -2) / 8**0.5
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(
        num_groups, 1
    )
    torch.testing.assert_close(mixed, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_row_attention_unsupported_models() -> None:
    states = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="Linear did not receive the layout of the rows"):
        row_attention(torch.nn.Linear(1, 1), states, states, states, None)
    rows = RowShape((4,), None, torch.device("cpu"))
    with pytest.raises(ValueError, match="passes softcap to its attention"):
        row_attention(
            torch.nn.Linear(1, 1), states, states, states, None, softcap=30.0, helmsman_rows=rows
        )
    with pytest.raises(ValueError, match="passes a mask of its own to its attention"):
        row_attention(
            torch.nn.Linear(1, 1),
            states,
            states,
            states,
            torch.zeros(1, 1, 4, 4),
            helmsman_rows=rows,
        )
