"""Orders the rows of a batch so that each rank's share has about the same number of tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from helmsman.api.parts import part_sizes


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
