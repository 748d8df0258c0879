"""Batch: named columns with one value for each row, as group calls cut, move and join them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias, overload

from helmsman.api.columns import Column, Ragged, concat_columns, kind_of, same, slice_of, take
from helmsman.api.errors import UnevenBatchError

Remainder: TypeAlias = Literal["error", "pad", "uneven"]
"""What becomes of rows that do not divide evenly. error: UnevenBatchError; pad: the last row is repeated and masked; uneven:
the first parts get one row more."""


class PerPart(tuple[Any, ...]):
    """A meta entry that differed between the batches that were joined: its value in each of them, None where it had none."""

    __slots__ = ()


class Batch:
    """Columns of equal length, and ``meta``, which belongs to all rows.

    It is frozen: no column or entry is added, replaced or removed; operations return new batches, which share memory with the
    old one wherever they can. Slices and chunks are views.
    """

    __slots__ = ("__weakref__", "_columns", "_meta", "_num_padding", "_num_rows")

    _columns: Mapping[str, Column]
    _meta: Mapping[str, Any]
    _num_padding: int
    _num_rows: int

    def __init__(
        self,
        columns: Mapping[str, Column | tuple[Any, ...]],
        meta: Mapping[str, Any] | None = None,
        *,
        num_rows: int | None = None,
        num_padding: int = 0,
    ) -> None:
        """Describe a batch; no data is copied.

        Args:
            columns: name -> tensor (N, ...) of any dtype and device, array (N, ...), list of N objects, or Ragged of N rows.
            meta: entries that hold for all rows.
            num_rows: N; needed only without columns.
            num_padding: of the N rows, how many at the end are padding.
        Raises: TypeError for a column that has no rows; ValueError for columns of different lengths.
        """
        kept: dict[str, Column] = {}
        for name, column in columns.items():
            if not isinstance(name, str):
                raise TypeError(f"names of columns are strings, not {name!r}")
            kept[name] = list(column) if isinstance(column, tuple) else column
            if not kind_of(kept[name]):
                raise TypeError(
                    f"column {name!r} is a {type(column).__qualname__}; a column is a tensor or array with at least one "
                    "dimension, a list, a tuple or a Ragged. Put what belongs to all rows in meta"
                )
        lengths = {name: len(column) for name, column in kept.items()}
        if num_rows is not None:
            lengths["num_rows"] = num_rows
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise ValueError(f"columns of one batch have as many rows; got {shown}")
        size = next(iter(lengths.values()), 0)
        if not 0 <= num_padding <= size:
            raise ValueError(f"num_padding is {num_padding} of {size} rows")
        self._freeze(kept, meta or {}, size, num_padding)

    def _freeze(self, columns: Mapping[str, Column], meta: Mapping[str, Any], num_rows: int, num_padding: int) -> None:
        set_ = object.__setattr__
        set_(self, "_columns", MappingProxyType(dict(columns)))
        set_(self, "_meta", MappingProxyType(dict(meta)))
        set_(self, "_num_rows", num_rows)
        set_(self, "_num_padding", num_padding)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a Batch is frozen; {name!r} cannot be set. with_columns and with_meta return a changed one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Batch is frozen; {name!r} cannot be deleted")

    # --- what is in it ----------------------------------------------------------------------------------------------

    @property
    def columns(self) -> Mapping[str, Column]:
        """Name -> column, read-only."""
        return self._columns

    @property
    def meta(self) -> Mapping[str, Any]:
        """Entries that hold for all rows, read-only."""
        return self._meta

    @property
    def num_padding(self) -> int:
        """How many rows at the end are padding."""
        return self._num_padding

    @property
    def mask(self) -> Column:
        """(N,) bool, False for padding: a tensor where the batch has tensors (on the device of the first), else an array where
        it has arrays, else a list."""
        flags = [True] * (len(self) - self.num_padding) + [False] * self.num_padding
        for kind in ("tensor", "array"):
            for column in self.columns.values():
                dense: Any = column.values if isinstance(column, Ragged) else column
                if kind_of(dense) == kind:
                    module = sys.modules["torch" if kind == "tensor" else "numpy"]
                    made: Column = module.tensor(flags, device=dense.device) if kind == "tensor" else module.array(flags, bool)
                    return made
        return list(flags)

    def __len__(self) -> int:
        return self._num_rows

    def __bool__(self) -> bool:
        return True  # an empty batch is still a batch, and not a missing one

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows."""
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int]) -> Batch: ...
    def __getitem__(self, key: str | int | slice | Sequence[int]) -> Any:
        """A column by its name; a row as a dict; rows of a slice as a view; rows of a list of indices as a copy."""
        if isinstance(key, str):
            if key not in self.columns:
                raise KeyError(f"no column {key!r}; there are {', '.join(self.columns) or 'none'}")
            return self.columns[key]
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._slice(start, max(start, stop)) if step == 1 else self.take(range(start, stop, step))
        if hasattr(key, "__index__") and not getattr(key, "shape", ()):
            index = key.__index__()
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of {len(self)}")
            return {name: column[index % len(self)] for name, column in self.columns.items()}
        return self.take(key)  # type: ignore[arg-type]

    def equals(self, other: Batch) -> bool:
        """Whether rows, columns, meta and padding are the same, element for element; NaN equals NaN."""
        return (
            (len(self), self.num_padding) == (len(other), other.num_padding)
            and same(dict(self.columns), dict(other.columns))
            and same(dict(self.meta), dict(other.meta))
        )

    def __repr__(self) -> str:
        def shape(column: Column) -> str:
            if isinstance(column, list):
                return "list"
            return repr(column) if isinstance(column, Ragged) else f"{tuple(column.shape)} {column.dtype}"

        parts = [f"{name}: {shape(column)}" for name, column in self.columns.items()]
        padding = f" ({self.num_padding} of them padding)" if self.num_padding else ""
        meta = f", meta: {', '.join(map(str, self.meta))}" if self.meta else ""
        return f"Batch({len(self)} rows{padding}, {', '.join(parts) or 'no columns'}{meta})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (dict(self.columns), dict(self.meta), len(self), self.num_padding)

    # --- columns and meta -------------------------------------------------------------------------------------------

    def select(self, *names: str) -> Batch:
        """These columns only, in this order."""
        return self._with({name: self[name] for name in names})

    def without(self, *names: str) -> Batch:
        """All columns but these, which must be there."""
        for name in names:
            _ = self[name]
        return self._with({name: column for name, column in self.columns.items() if name not in names})

    def with_columns(self, **columns: Column) -> Batch:
        """With these columns added, or in place of those of the same name."""
        return Batch({**self.columns, **columns}, self.meta, num_rows=len(self), num_padding=self.num_padding)

    def with_meta(self, **entries: Any) -> Batch:
        """With these entries of meta added, or in place of those of the same name."""
        return _restore(self.columns, {**self.meta, **entries}, len(self), self.num_padding)

    def union(self, other: Batch) -> Batch:
        """The columns and meta of both, row by row.

        Raises: ValueError for different numbers of rows, or a name under which they have different values.
        """
        if (len(self), self.num_padding) != (len(other), other.num_padding):
            raise ValueError(
                f"a union is made row by row; got {len(self)} rows ({self.num_padding} padding) and {len(other)} rows "
                f"({other.num_padding} padding)"
            )
        for what, own, others in (("column", self.columns, other.columns), ("meta entry", self.meta, other.meta)):
            for name in own.keys() & others.keys():
                if not same(own[name], others[name]):
                    raise ValueError(f"both batches have the {what} {name!r}, with different values; drop or rename one")
        return _restore({**self.columns, **other.columns}, {**self.meta, **other.meta}, len(self), self.num_padding)

    # --- rows -------------------------------------------------------------------------------------------------------

    def take(self, rows: Sequence[int]) -> Batch:
        """These rows, copied, in their order; a row may be taken again. Only a batch without padding."""
        self._require_no_padding("take")
        found = [int(row) for row in (rows.tolist() if hasattr(rows, "tolist") else rows)]
        for row in found:
            if not -len(self) <= row < len(self):
                raise IndexError(f"row {row} of {len(self)}")
        found = [row % len(self) for row in found]
        return _restore({name: take(column, found) for name, column in self.columns.items()}, self.meta, len(found), 0)

    def reorder(self, permutation: Sequence[int]) -> Batch:
        """The same rows in another order: row i of the result is row ``permutation[i]`` of this one.

        Raises: ValueError where it is not a permutation of all rows.
        """
        found = [int(row) for row in (permutation.tolist() if hasattr(permutation, "tolist") else permutation)]
        if sorted(found) != list(range(len(self))):
            raise ValueError(f"a permutation of {len(self)} rows has each of them once; got {len(found)} indices: {found[:8]}")
        return self.take(found)

    def repeat(self, times: int, *, interleave: bool = True) -> Batch:
        """Each row ``times`` times: one after another (aabb), or the whole batch again (abab) without ``interleave``."""
        if times < 0:
            raise ValueError(f"times is {times}; it is 0 or more")
        rows = range(len(self))
        return self.take([row for row in rows for _ in range(times)] if interleave else [*rows] * times)

    def group_by(self, key: str | Callable[[dict[str, Any]], Hashable]) -> dict[Any, Batch]:
        """Rows by the value of a column, or by what a function makes of each row; groups in the order of their first rows."""
        groups: dict[Any, list[int]] = {}
        if callable(key):
            values: Sequence[Any] = [key(row) for row in self]
        else:
            column = self[key]
            if isinstance(column, Ragged) or len(getattr(column, "shape", (1,))) > 1:
                raise TypeError(f"column {key!r} has more than one value for a row; give group_by a function of the row")
            values = column.tolist() if hasattr(column, "tolist") else column
        for row, value in enumerate(values):
            groups.setdefault(value, []).append(row)
        return {value: self.take(rows) for value, rows in groups.items()}

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Views of so many rows each, which are all rows together."""
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise ValueError(f"sizes {list(sizes)[:8]} do not add up to the {len(self)} rows")
        parts, start = [], 0
        for size in sizes:
            parts.append(self._slice(start, start + size))
            start += size
        return parts

    def chunk(self, num_chunks: int, remainder: Remainder = "error") -> list[Batch]:
        """Views of equal numbers of rows, as far as ``remainder`` asks for it; always ``num_chunks`` of them.

        Raises: UnevenBatchError.
        """
        batch = self.pad(num_chunks) if remainder == "pad" else self
        return batch.split(part_sizes(len(batch), num_chunks, remainder))

    def pad(self, multiple: int) -> Batch:
        """Rows added until their number is a multiple: copies of the last one, which ``mask`` shows and ``unpad`` removes."""
        missing = -len(self) % multiple
        if not missing:
            return self
        last = self._slice(len(self) - 1, len(self))
        columns = {
            name: concat_columns([column, take(last.columns[name], [0] * missing)]) for name, column in self.columns.items()
        }
        return _restore(columns, self.meta, len(self) + missing, self.num_padding + missing)

    def unpad(self) -> Batch:
        """Without the padding."""
        return _restore(*self._parts(0, len(self) - self.num_padding), 0) if self.num_padding else self

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The rows of all of them, one batch after another.

        Entries of meta that are not the same in all become a PerPart. Only the last rows may be padding.

        Raises: ValueError for no batches or different columns, TypeError for columns of different kinds or dtypes.
        """
        if not batches:
            raise ValueError("concat needs at least one batch")
        if len(batches) == 1:
            return batches[0]
        names = list(batches[0].columns)
        padding = 0
        for index, batch in enumerate(batches):
            if set(batch.columns) != set(names):
                raise ValueError(f"batch {index} has the columns {', '.join(batch.columns)}; the first has {', '.join(names)}")
            if padding and batch.num_padding < len(batch):
                raise ValueError(f"batch {index} has rows behind the padding of one before it; unpad first")
            padding += batch.num_padding
        columns = {}
        for name in names:
            try:
                columns[name] = concat_columns([batch.columns[name] for batch in batches])
            except (TypeError, ValueError, RuntimeError) as error:
                raise type(error)(f"column {name!r}: {error}") from error
        return _restore(columns, join_meta([batch.meta for batch in batches]), sum(map(len, batches)), padding)

    # --- to and from others -----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Name -> column, without meta and padding."""
        return dict(self.unpad().columns)

    @classmethod
    def from_dict(cls, columns: Mapping[str, Column | tuple[Any, ...]], meta: Mapping[str, Any] | None = None) -> Batch:
        """As the constructor."""
        return cls(columns, meta)

    def to_tensordict(self) -> Any:
        """A TensorDict of batch size (N,), without padding: tensors and arrays share memory, ragged columns are nested tensors,
        lists are stacks of non-tensor data, and meta lies under 'meta'. Needs the package tensordict."""
        from helmsman.api.tensordicts import to_tensordict

        batch = self.unpad()
        return to_tensordict(dict(batch.columns), dict(batch.meta), len(batch))

    @classmethod
    def from_tensordict(cls, tensordict: Any) -> Batch:
        """The batch of a TensorDict with one batch dimension; nested tensors must be jagged."""
        from helmsman.api.tensordicts import from_tensordict

        columns, meta = from_tensordict(tensordict)
        return cls(columns, meta, num_rows=int(tensordict.batch_size[0]))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _parts(self, start: int, stop: int) -> tuple[dict[str, Column], Mapping[str, Any], int]:
        return {name: slice_of(column, start, stop) for name, column in self.columns.items()}, self.meta, stop - start

    def _slice(self, start: int, stop: int) -> Batch:
        padding = max(0, min(stop - start, stop - (len(self) - self.num_padding)))
        return _restore(*self._parts(start, stop), padding)

    def _with(self, columns: Mapping[str, Column]) -> Batch:
        return _restore(columns, self.meta, len(self), self.num_padding)

    def _require_no_padding(self, operation: str) -> None:
        if self.num_padding:
            raise ValueError(f"{operation} of a batch whose last {self.num_padding} rows are padding; unpad() first")


def _restore(columns: Mapping[str, Column], meta: Mapping[str, Any], num_rows: int, num_padding: int) -> Batch:
    """A batch of parts that are known to agree."""
    batch = Batch.__new__(Batch)
    batch._freeze(columns, meta, num_rows, num_padding)
    return batch


def join_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Entries that are the same in all; the others as PerPart."""
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for meta in metas for name in meta):
        values = [meta.get(name) for meta in metas]
        in_all = all(name in meta and same(meta[name], values[0]) for meta in metas)
        joined[name] = values[0] if in_all else PerPart(values)
    return joined


def part_sizes(num_rows: int, num_parts: int, remainder: Remainder, derivation: str = "") -> list[int]:
    """How many rows each part gets; with 'pad' the rows have been padded already. Raises: UnevenBatchError."""
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; it is 1 or more")
    size, rest = divmod(num_rows, num_parts)
    if rest and remainder != "uneven":
        raise UnevenBatchError(num_rows=num_rows, divisor=num_parts, derivation=derivation)
    return [size + (index < rest) for index in range(num_parts)]
