"""Batch: named columns with one value per row, which group calls split, move and join."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

from helmsman.api.columns import (
    Column,
    Frozen,
    GivenRows,
    Ragged,
    check_column,
    concat_columns,
    fill_rows,
    flags_beside,
    row_number,
    row_numbers,
    rows_by_value,
    same,
    shown,
    take,
)
from helmsman.api.parts import PerPart as PerPart
from helmsman.api.parts import (
    Remainder,
    bounds_of_parts,
    join_meta,
    joined_padding,
    part_sizes,
    positive,
)
from helmsman.api.tensordicts import from_tensordict, to_tensordict


class Batch(Frozen):
    """Columns of equal length, and ``meta``, which applies to all rows.

    A batch is frozen: no column or entry is added, replaced or removed. Operations return new
    batches, which share memory with the original where possible; slices and chunks are views. Do
    not modify a column in place, in particular a list.

    Args:
        columns: Name -> tensor (N, ...) of any dtype and device, array (N, ...), list of N objects,
            or Ragged of N rows. Tensors must be strided; convert a nested tensor to a Ragged. Data
            is not copied; of lists only the references are.
        meta: Entries that apply to all rows.
        num_rows: N; required only without columns.

    Raises:
        TypeError: A value is not a column, or a name is not a string.
        ValueError: The columns have different lengths.
    """

    __slots__ = ("__weakref__", "_num_rows", "columns", "meta", "num_padding")

    columns: Mapping[str, Column]
    """Name -> column, read-only."""
    meta: Mapping[str, Any]
    """Entries that apply to all rows, read-only."""
    num_padding: int
    """Number of padding rows at the end."""
    _num_rows: int

    def __init__(
        self,
        columns: Mapping[str, Column | tuple[Any, ...]],
        meta: Mapping[str, Any] | None = None,
        *,
        num_rows: int | None = None,
    ) -> None:
        kept: dict[str, Column] = {}
        for name, column in columns.items():
            if not isinstance(name, str):
                raise TypeError(f"names of columns are strings, not {name!r}")
            # Copied, so that later changes of the caller's list do not change the batch.
            kept[name] = list(column) if isinstance(column, (list, tuple)) else column
            check_column(name, kept[name])
        lengths = {name: len(column) for name, column in kept.items()}
        if num_rows is not None:
            lengths["num_rows"] = operator.index(num_rows)
            if num_rows < 0:
                raise ValueError(f"num_rows is {num_rows}; expected 0 or more")
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise ValueError(f"the columns of a batch must have equal numbers of rows; got {found}")
        self._freeze(kept, meta or {}, next(iter(lengths.values()), 0), 0)

    def _freeze(
        self,
        columns: Mapping[str, Column],
        meta: Mapping[str, Any],
        num_rows: int,
        num_padding: int,
    ) -> None:
        frozen = {"columns": MappingProxyType(dict(columns)), "meta": MappingProxyType(dict(meta))}
        self._fill(**frozen, _num_rows=num_rows, num_padding=num_padding)

    # --- contents ---------------------------------------------------------------------------------

    @property
    def mask(self) -> Column:
        """(N,) bool, False for padding.

        A tensor on the device of the first tensor if the batch has tensors, else an array if it has
        arrays, else a list.
        """
        flags = [row < len(self) - self.num_padding for row in range(len(self))]
        return flags_beside(self.columns.values(), flags)

    def __len__(self) -> int:
        return self._num_rows

    def __bool__(self) -> bool:
        return True  # An empty batch is not a missing one.

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the rows."""
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> Batch: ...
    def __getitem__(self, key: str | int | slice) -> Any:
        """Return a column by name, a row as a dict, or the rows of a slice.

        A slice without a step is a view; with a step the rows are copied, as by ``take``.
        """
        if isinstance(key, str):
            if key not in self.columns:
                raise KeyError(f"no column {key!r}; there are {', '.join(self.columns) or 'none'}")
            return self.columns[key]
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return (
                self._slice(start, max(start, stop))
                if step == 1
                else self._take(range(start, stop, step), "take")
            )
        row = row_number(key, len(self))
        return {name: column[row] for name, column in self.columns.items()}

    def equals(self, other: object) -> bool:
        """Compare rows, columns, meta and padding element by element; NaN equals NaN."""
        return (
            isinstance(other, Batch)
            and (len(self), self.num_padding) == (len(other), other.num_padding)
            and same(dict(self.columns), dict(other.columns))
            and same(dict(self.meta), dict(other.meta))
        )

    def __repr__(self) -> str:
        def shape(column: Any) -> str:
            if isinstance(column, list):
                return "list"
            is_ragged = isinstance(column, Ragged)
            return repr(column) if is_ragged else f"{tuple(column.shape)} {column.dtype}"

        parts = [f"{name}: {shape(column)}" for name, column in self.columns.items()]
        padding = f" ({self.num_padding} of them padding)" if self.num_padding else ""
        meta = f", meta: {', '.join(map(str, self.meta))}" if self.meta else ""
        return f"Batch({len(self)} rows{padding}, {', '.join(parts) or 'no columns'}{meta})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (dict(self.columns), dict(self.meta), len(self), self.num_padding)

    # --- columns and meta -------------------------------------------------------------------------

    def select(self, *names: str) -> Batch:
        """Return a batch with these columns only, in this order."""
        return _restore(
            {name: self[name] for name in names}, self.meta, len(self), self.num_padding
        )

    def with_columns(self, **columns: Column | tuple[Any, ...]) -> Batch:
        """Return a batch with these columns added or replaced."""
        all_columns = Batch({**self.columns, **columns}, num_rows=len(self)).columns
        return _restore(all_columns, self.meta, len(self), self.num_padding)

    def rename(self, names: Mapping[str, str]) -> Batch:
        """Return a batch with columns renamed: old name -> new name.

        Raises:
            KeyError: There is no such column.
            ValueError: Two columns would have the same name.
        """
        for name in names:
            self[name]
        renamed = [names.get(name, name) for name in self.columns]
        if twice := sorted({name for name in renamed if renamed.count(name) > 1}):
            raise ValueError(f"two columns would have the name {', '.join(twice)}")
        columns = dict(zip(renamed, self.columns.values(), strict=True))
        return _restore(columns, self.meta, len(self), self.num_padding)

    def without_meta(self, *names: str) -> Batch:
        """Return a batch without these meta entries, or without any if none is named."""
        meta = {name: value for name, value in self.meta.items() if names and name not in names}
        return _restore(self.columns, meta, len(self), self.num_padding)

    def union(self, other: Batch) -> Batch:
        """Return a batch with the columns and meta of both, row by row.

        Raises:
            ValueError: The numbers of rows differ, or a name has different values in both.
        """
        if (len(self), self.num_padding) != (len(other), other.num_padding):
            raise ValueError(
                f"union needs equal numbers of rows; got {len(self)} rows ({self.num_padding} "
                f"padding) and {len(other)} rows ({other.num_padding} padding)"
            )
        for what, held, others in (
            ("column", self.columns, other.columns),
            ("meta entry", self.meta, other.meta),
        ):
            for name in held:
                if name in others and not same(held[name], others[name]):
                    raise ValueError(
                        f"both batches have the {what} {name!r}, with different values; drop or "
                        "rename one"
                    )
        return _restore(
            {**self.columns, **other.columns},
            {**self.meta, **other.meta},
            len(self),
            self.num_padding,
        )

    # --- rows -------------------------------------------------------------------------------------

    def take(self, rows: GivenRows) -> Batch:
        """Copy rows in the given order; a row may occur several times.

        Requires a batch without padding.

        Args:
            rows: Integers, negative ones from the end, in a sequence, array or tensor of one
                dimension; or a mask of N booleans.

        Raises:
            IndexError: A row does not exist, or the mask has another length.
            TypeError: The indices are neither integers nor booleans.
            ValueError: The batch has padding.
        """
        return self._take(row_numbers(rows, len(self)), "take")

    def _take(self, rows: Sequence[int], operation: str) -> Batch:
        self._require_no_padding(operation)
        return self._copied(rows)

    def reorder(self, permutation: GivenRows) -> Batch:
        """Permute the rows: row i of the result is row ``permutation[i]`` of this batch.

        Raises:
            ValueError: It is not a permutation of all rows, or the batch has padding.
        """
        try:
            rows = row_numbers(permutation, len(self))
        except IndexError as error:
            raise ValueError(
                f"expected a permutation of the {len(self)} rows, each exactly once: {error}"
            ) from error
        if sorted(rows) != list(range(len(self))):
            raise ValueError(
                f"expected a permutation of the {len(self)} rows, each exactly once; got "
                f"{len(rows)} indices: {shown(rows)}"
            )
        return self._take(rows, "reorder")

    def repeat(self, times: int, *, interleave: bool = True) -> Batch:
        """Repeat the rows of a batch without padding.

        Args:
            times: Number of copies of each row.
            interleave: True repeats row by row (aabb), False the whole batch (abab).

        Returns:
            A batch of ``times`` * N rows.

        Raises:
            ValueError: ``times`` is negative, or the batch has padding.
        """
        count = operator.index(times)
        if count < 0:
            raise ValueError(f"times is {count}; expected 0 or more")
        rows = range(len(self))
        return self._take(
            [row for row in rows for _ in range(count)] if interleave else [*rows] * count, "repeat"
        )

    def group_by(self, key: str | Callable[[dict[str, Any]], Hashable]) -> dict[Any, Batch]:
        """Group rows by a column's value or a function of the row; groups keep first-row order.

        Groups are views: of this batch if each group's rows are adjacent, else of one copy. All NaN
        count as one value.

        Raises:
            KeyError: The column does not exist.
            TypeError: The column does not have one hashable value per row.
            ValueError: The batch has padding.
        """
        self._require_no_padding("group_by")
        if callable(key):
            values: Sequence[Any] = [key(row) for row in self]
        else:
            column = self[key]
            if isinstance(column, Ragged) or len(getattr(column, "shape", (1,))) > 1:
                raise TypeError(
                    f"column {key!r} has more than one value for a row; give group_by a function "
                    "of the row"
                )
            values = column.tolist() if hasattr(column, "tolist") else column
        groups = rows_by_value(values)
        order = [row for rows in groups.values() for row in rows]
        together = self if order == list(range(len(self))) else self._take(order, "group_by")
        return dict(
            zip(groups, together.split([len(rows) for rows in groups.values()]), strict=True)
        )

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Split into views with these numbers of rows.

        Raises:
            ValueError: A size is negative, or the sizes do not add up to N.
        """
        return [self._slice(start, stop) for start, stop in bounds_of_parts(sizes, len(self))]

    def chunk(self, num_chunks: int, remainder: Remainder = "error") -> list[Batch]:
        """Split into ``num_chunks`` views of equal size.

        Args:
            num_chunks: Number of chunks.
            remainder: Handling of rows that do not divide evenly. With 'pad', only the chunks that
                have padding are copies.

        Returns:
            Exactly ``num_chunks`` batches.

        Raises:
            UnevenBatchError: The rows do not divide, and ``remainder`` is 'error'.
            ValueError: ``num_chunks`` is less than 1, or ``remainder`` is unknown.
        """
        if remainder != "pad":
            return self.split(part_sizes(len(self), num_chunks, remainder))
        size = -(-len(self) // positive(num_chunks, "num_chunks"))
        bounds = [min(len(self), size * index) for index in range(num_chunks + 1)]
        return [
            self._extended(self._slice(start, stop), size - (stop - start))
            for start, stop in itertools.pairwise(bounds)
        ]

    def pad(self, multiple: int) -> Batch:
        """Append copies of the last row until the number of rows is a multiple of ``multiple``.

        ``mask`` marks these rows and ``unpad`` removes them. A batch without rows stays empty.
        """
        return self._extended(self, -len(self) % positive(multiple, "multiple"))

    def _extended(self, part: Batch, num_missing: int) -> Batch:
        """Append ``num_missing`` copies of this batch's last row to a part, as padding."""
        if not num_missing:
            return part
        return self._joined(
            [part, self._copied([len(self) - 1] * num_missing)], part.num_padding + num_missing
        )

    def unpad(self) -> Batch:
        """Return the batch without padding."""
        return self._slice(0, len(self) - self.num_padding) if self.num_padding else self

    @staticmethod
    def concat(batches: Sequence[Batch], *, fill: Mapping[str, Any] | None = None) -> Batch:
        """Concatenate batches. Only the last rows may be padding.

        Args:
            batches: The batches. Dicts in their meta entry ``metrics`` become one: a list of the
                values of each name, lists and arrays joined. Other meta entries that differ become
                a PerPart.
            fill: Column -> value with which rows of different shapes are filled up, at the end of
                each dimension, such as the id of the padding token.

        Returns:
            A batch of all rows; a single batch as it is.

        Raises:
            ValueError: There are no batches, or columns, row shapes or devices differ, or rows
                would follow padding.
            TypeError: An entry is not a batch, or kinds or dtypes of a column differ.
        """
        batches = list(batches)
        if not batches:
            raise ValueError("concat needs at least one batch")
        for index, batch in enumerate(batches):
            if not isinstance(batch, Batch):
                raise TypeError(
                    f"concat joins batches, and entry {index} is a {type(batch).__qualname__}"
                )
        if len(batches) == 1:
            return batches[0]
        for name, value in (fill or {}).items():
            filled = fill_rows([batch[name] for batch in batches], value)
            batches = [
                batch.with_columns(**{name: column})
                for batch, column in zip(batches, filled, strict=True)
            ]
        padding = joined_padding([(len(batch), batch.num_padding) for batch in batches])
        return Batch._joined(batches, padding)

    @staticmethod
    def _joined(batches: Sequence[Batch], num_padding: int) -> Batch:
        names = list(batches[0].columns)
        for index, batch in enumerate(batches):
            if set(batch.columns) != set(names):
                raise ValueError(
                    f"batch {index} has the columns {', '.join(batch.columns) or 'none'}; the "
                    "first has "
                    f"{', '.join(names) or 'none'}"
                )
        columns = {
            name: concat_columns([batch.columns[name] for batch in batches], f"column {name!r}: ")
            for name in names
        }
        return _restore(
            columns,
            join_meta([batch.meta for batch in batches]),
            sum(map(len, batches)),
            num_padding,
        )

    # --- conversions ------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return name -> column, without meta and padding."""
        return dict(self.unpad().columns)

    def to_tensordict(self) -> Any:
        """Convert to a TensorDict of batch size (N,), without padding.

        Tensors and numeric arrays share memory if torch can use it unchanged. Numeric ragged
        columns become jagged nested tensors, all other columns stacks of non-tensor data. Meta is
        stored under 'meta'.

        Raises:
            BackendNotInstalledError: The package tensordict is missing.
            ValueError: A column is named 'meta' and the batch has meta.
        """
        batch = self.unpad()
        return to_tensordict(batch.columns, batch.meta, len(batch))

    @classmethod
    def from_tensordict(cls, tensordict: Any) -> Batch:
        """Convert a TensorDict with one batch dimension.

        Tensors share memory. Nested tensors become Ragged, stacks of non-tensor data become lists,
        and non-tensor data of all rows becomes meta.

        Raises:
            BackendNotInstalledError: The package tensordict is missing.
            ValueError: The batch size does not have one dimension.
            TypeError: It is not a TensorDict, or contains another one.
        """
        columns, meta = from_tensordict(tensordict)
        return cls(columns, meta, num_rows=int(tensordict.batch_size[0]))

    # --- helpers ----------------------------------------------------------------------------------

    def _slice(self, start: int, stop: int) -> Batch:
        columns = {name: column[start:stop] for name, column in self.columns.items()}
        return _restore(columns, self.meta, stop - start, self._padding_within(start, stop))

    def _copied(self, rows: Sequence[int]) -> Batch:
        columns = {name: take(column, rows) for name, column in self.columns.items()}
        return _restore(columns, self.meta, len(rows), 0)

    def _padding_within(self, start: int, stop: int) -> int:
        return max(0, min(stop - start, stop - (len(self) - self.num_padding)))

    def _require_no_padding(self, operation: str) -> None:
        if self.num_padding:
            raise ValueError(
                f"{operation} requires a batch without padding, and the last {self.num_padding} "
                "rows are padding; call unpad() first"
            )


def _restore(
    columns: Mapping[str, Column], meta: Mapping[str, Any], num_rows: int, num_padding: int
) -> Batch:
    batch = Batch.__new__(Batch)
    batch._freeze(columns, meta, num_rows, num_padding)
    return batch
