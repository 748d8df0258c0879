"""Parts of a batch: their sizes, an order that balances them, and the meta of joined parts."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from helmsman.api.columns import same, shown
from helmsman.api.errors import UnevenBatchError

Remainder: TypeAlias = Literal["error", "pad", "uneven"]
"""Handling of rows that do not divide evenly. error: UnevenBatchError; pad: the last row is
repeated and masked; uneven: the first parts get one more row.
"""


class PerPart(tuple[Any, ...]):
    """A meta entry that differs between joined batches: the value of each, None if missing."""

    __slots__ = ()


def part_sizes(num_rows: int, num_parts: int, remainder: Remainder) -> list[int]:
    """Return the number of rows of each part.

    Args:
        num_rows: Number of rows; already padded with 'pad'.
        num_parts: Number of parts.
        remainder: Handling of rows that do not divide evenly.

    Returns:
        The sizes of the parts.

    Raises:
        UnevenBatchError: The rows do not divide, and ``remainder`` is not 'uneven'.
        ValueError: ``num_parts`` is less than 1, or ``remainder`` is unknown.
    """
    if remainder not in get_args(Remainder):
        raise ValueError(
            f"remainder is {remainder!r}; expected one of {', '.join(get_args(Remainder))}"
        )
    size, rest = divmod(num_rows, positive(num_parts, "num_parts"))
    if rest and remainder != "uneven":
        raise UnevenBatchError(num_rows=num_rows, divisor=num_parts)
    return [size + (index < rest) for index in range(num_parts)]


def balanced_order(lengths: Sequence[int], num_parts: int) -> list[int]:
    """Order rows so that consecutive, equal shares of them have about equally many tokens.

    ``batch.reorder(balanced_order([len(row) for row in batch["tokens"]], cluster.dp_size))`` before
    a call that cuts the rows over dp: no rank then waits long for another. The longest rows are
    placed first, each in the share with the fewest tokens that has room.

    Args:
        lengths: Tokens of each row.
        num_parts: Number of shares. If they do not divide the rows, the first ones have one row
            more, as with ``remainder='uneven'``.

    Returns:
        A permutation of the row numbers, for ``Batch.reorder``. Rows of a share keep their order.

    Raises:
        ValueError: ``num_parts`` is less than 1.
    """
    sizes = part_sizes(len(lengths), num_parts, "uneven")
    parts: list[list[int]] = [[] for _ in sizes]
    with_room = [(0, part) for part, size in enumerate(sizes) if size]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        tokens, part = heapq.heappop(with_room)
        parts[part].append(row)
        if len(parts[part]) < sizes[part]:
            heapq.heappush(with_room, (tokens + lengths[row], part))
    return [row for part in parts for row in sorted(part)]


def bounds_of_parts(sizes: Sequence[int], num_rows: int) -> list[tuple[int, int]]:
    """Return the first row and the end of each part.

    Raises:
        ValueError: A size is negative, or the sizes do not add up to ``num_rows``.
    """
    counts = [operator.index(size) for size in sizes]
    if min(counts, default=0) < 0:
        raise ValueError(f"a part has {min(counts)} rows; expected 0 or more")
    if sum(counts) != num_rows:
        raise ValueError(
            f"sizes [{shown(counts)}] add up to {sum(counts)}, and there are {num_rows} rows"
        )
    return list(itertools.pairwise(itertools.accumulate(counts, initial=0)))


def positive(number: int, name: str) -> int:
    """Return a number, or raise ValueError if it is less than 1."""
    if operator.index(number) < 1:
        raise ValueError(f"{name} is {number}; expected 1 or more")
    return number


def joined_padding(parts: Iterable[tuple[int, int]]) -> int:
    """Return the number of padding rows of joined batches, each given by (rows, padding rows).

    Raises:
        ValueError: Rows of a batch would follow the padding of another.
    """
    padding = 0
    for index, (num_rows, num_padding) in enumerate(parts):
        if padding and num_padding < num_rows:
            raise ValueError(
                f"batch {index} cannot be joined to a batch that ends with padding; unpad() that "
                "batch first"
            )
        padding += num_padding
    return padding


def join_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge meta entries; those that are not equal in all become a PerPart.

    Dicts of ``metrics`` become one, with a list of the values of each name.
    """
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for meta in metas for name in meta):
        values = [meta.get(name) for meta in metas]
        metrics = [value for value in values if value is not None]
        if name == "metrics" and metrics and all(isinstance(each, Mapping) for each in metrics):
            joined[name] = _merged_metrics(metrics)
            continue
        in_all = all(name in meta and same(meta[name], values[0]) for meta in metas)
        joined[name] = values[0] if in_all else PerPart(values)
    return joined


def _merged_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    merged: dict[str, list[Any]] = {}
    for each in metrics:
        for name, value in each.items():
            plain = value.tolist() if hasattr(value, "tolist") else value
            merged.setdefault(name, []).extend(plain if isinstance(plain, list) else [plain])
    return merged
