"""How a batch is cut over data-parallel ranks: pure functions of the samples' lengths."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from helmsman.api.pairs import sample_units


def split_by_tokens(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Cut samples into ``num_parts`` shares of about equally many tokens.

    Longest first, each to the share with the fewest tokens (Graham 1969, "Bounds on multiprocessing timing anomalies"): the
    largest share has at most 4/3 of the best possible, and no two shares differ by more than the longest sample. Equal inputs
    give equal cuts.

    Args:
        lengths: tokens of each sample, 0 or more.
        num_parts: number of shares, 1 or more.
    Returns: for each share the indices into ``lengths`` in ascending order; empty shares when there are fewer samples than
        shares.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; expected 1 or more")
    shares: list[list[int]] = [[] for _ in range(num_parts)]
    # The number of samples breaks ties of tokens, so that samples without tokens spread as well.
    heap = [(0, 0, part) for part in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        num_tokens, num_samples, part = heap[0]
        shares[part].append(index)
        heapq.heapreplace(heap, (num_tokens + lengths[index], num_samples + 1, part))
    for share in shares:
        share.sort()
    return shares


def split_samples(samples: Sequence[Mapping[str, Any]], num_parts: int) -> list[list[int]]:
    """Cut a batch as split_by_tokens does, the two samples of a pair (helmsman.api.pairs) always into the same share.

    Raises: as sample_lengths and sample_units.
    """
    lengths = sample_lengths(samples)
    units = sample_units(samples)
    shares = split_by_tokens([sum(lengths[index] for index in unit) for unit in units], num_parts)
    return [sorted(index for number in share for index in units[number]) for share in shares]


def sample_lengths(samples: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokens of each sample of a batch, after checking that the batch makes sense.

    Raises: ValueError naming the sample and the column, when the batch is empty, a sample has no or no flat ``input_ids``, a
        per-token column has another length, or the samples do not all have the same columns.
    """
    if not samples:
        raise ValueError("the batch has no samples; give at least one")
    columns = set(samples[0])
    lengths = []
    for index, sample in enumerate(samples):
        if "input_ids" not in sample:
            raise ValueError(f"sample {index} has no column 'input_ids'; it has {sorted(sample)}")
        num_tokens = _num_entries(index, "input_ids", sample["input_ids"])
        if not num_tokens:
            what = "a scalar" if num_tokens is None else "empty"
            raise ValueError(f"sample {index}: column 'input_ids' is {what}; expected the token ids of one sequence")
        if set(sample) != columns:
            column = min(set(sample) ^ columns)
            having, missing = (index, 0) if column in sample else (0, index)
            raise ValueError(
                f"sample {missing} has no column {column!r}, but sample {having} has; give it to all samples or to none"
            )
        for column, value in sample.items():
            num_entries = _num_entries(index, column, value)
            if num_entries is not None and num_entries != num_tokens:
                raise ValueError(
                    f"sample {index}: column {column!r} has {num_entries} entries, but 'input_ids' has {num_tokens}; expected "
                    "one entry per token, or a scalar"
                )
        lengths.append(num_tokens)
    return lengths


def _num_entries(index: int, column: str, value: Any) -> int | None:
    """Entries of a flat column; None for a scalar. Arrays and tensors are known by ``shape``, without importing a library."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        if len(shape) > 1:
            raise ValueError(
                f"sample {index}: column {column!r} has shape {tuple(shape)}; expected one entry per token, or a scalar"
            )
        return int(shape[0]) if shape else None
    if isinstance(value, (str, bytes)):
        return None
    try:
        return len(value)
    except TypeError:
        return None
