"""A key-value cache of fixed slots, so that sequences can join and leave a batch between two decoding steps.

Row r of each layer's pool holds the keys and values of one sequence, from column 0 on. Running sequences fill the rows from
0 on without gaps, so that a step works on views and copies nothing but the new entries. Joining and leaving at every step is
the iteration-level scheduling of Orca (OSDI 2022).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Cursor:
    """Where the next forward pass writes; the layers of one cache share it.

    Attributes:
        prefill: Whether a whole prompt is written, rather than one token per row.
        rows: Prefill: (B,) the forward pass's row for each slot that is written. Decoding: (N,) the slots 0 to N - 1.
        start: Prefill: first slot that is written.
        columns: Decoding: (N,) the column of each slot's new token.
        width: Decoding: number of columns that attention looks at.
    """

    def __init__(self) -> None:
        self.prefill = True
        self.rows = torch.empty(0, dtype=torch.int64)
        self.start = 0
        self.columns = torch.empty(0, dtype=torch.int64)
        self.width = 0


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """One layer's pool of keys and values, each (slots, heads, columns, head size)."""

    is_sliding = False

    def __init__(self, cursor: Cursor, num_slots: int, num_columns: int) -> None:
        super().__init__()
        self._cursor = cursor
        self._num_slots = num_slots
        self._num_columns = num_columns
        self._released: tuple[torch.Size, torch.Size] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pools for states like these; zeros, since a masked NaN would still spoil the sum."""
        shape = (self._num_slots, key_states.shape[1], self._num_columns)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states (B, heads, T, head size); returns the states to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cursor, keys, values = self._cursor, self.keys, self.values
        if cursor.prefill:
            slots, length = slice(cursor.start, cursor.start + len(cursor.rows)), key_states.shape[2]
            keys[slots, :, :length] = key_states[cursor.rows]
            values[slots, :, :length] = value_states[cursor.rows]
            return key_states, value_states
        num_rows, width = len(cursor.rows), cursor.width
        keys[cursor.rows, :, cursor.columns] = key_states[:, :, 0]
        values[cursor.rows, :, cursor.columns] = value_states[:, :, 0]
        return keys[:num_rows, :, :width], values[:num_rows, :, :width]

    def release(self) -> None:
        """Give the pools' memory back; nothing may be stored until allocate."""
        if self.is_initialized and self._released is None:
            self._released = (self.keys.shape, self.values.shape)
            self.keys, self.values = self.keys.new_empty(0), self.values.new_empty(0)

    def allocate(self) -> None:
        """Have the pools again that were released, empty."""
        if self._released is not None:
            keys, values = self._released
            self.keys, self.values = self.keys.new_zeros(keys), self.values.new_zeros(values)
            self._released = None

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first columns of one slot to another."""
        if self.is_initialized:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys for the masks that the model makes, which it does in prefill only."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before those of a forward pass: none in prefill; while decoding they are given as positions."""
        return 0

    def get_max_length(self) -> int:
        """Columns of a slot."""
        return self._num_columns


class SlotCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The slots of all layers, each for a sequence of so many tokens; layers appear as the model first uses them."""

    def __init__(self, num_slots: int, num_columns: int) -> None:
        self.cursor = Cursor()
        super().__init__(layer_class_to_replicate=functools.partial(SlotLayer, self.cursor, num_slots, num_columns))

    def release(self) -> None:
        """Give the memory of all slots back."""
        for layer in self.layers:
            layer.release()

    def allocate(self) -> None:
        """Have all slots again, empty. Raises: torch.OutOfMemoryError, and has none of them."""
        try:
            for layer in self.layers:
                layer.allocate()
        except BaseException:
            self.release()
            raise

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first columns of one slot to another, in every layer."""
        for layer in self.layers:
            layer.move(source, target, length)
