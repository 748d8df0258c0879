"""Columns of a Batch: tensors, NumPy arrays, lists, and ragged rows. torch and NumPy are loaded only where a value needs them.

Slices of tensors, arrays and ragged columns are views of the same memory.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, overload

from helmsman.api.row_numbers import GivenRows, RowNumbers, int64_vector

if TYPE_CHECKING:
    import numpy as np
    import torch

Dense: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
"""A tensor or array whose first dimension is the rows."""
Column: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | list[Any] | Ragged"
"""What a batch has under one name: a value for each row."""


class Ragged:
    """Rows of different lengths in one piece of memory.

    Row i is ``values[offsets[i]:offsets[i + 1]]``, as in torch's jagged nested tensors. It is frozen, as a Batch is.
    """

    __slots__ = ("offsets", "values")

    values: Dense
    """(T, ...), the rows one after another."""
    offsets: Dense
    """(N + 1,) int64 on the host, of the same library as ``values``; from 0 to T, never falling."""

    def __init__(self, values: Dense, offsets: Dense | Sequence[int]) -> None:
        """Takes over ``values`` and copies ``offsets``.

        Raises: ValueError for offsets that do not describe the values; TypeError for values that are neither a tensor nor an
        array, and offsets that are not integers.
        """
        kind = kind_of(values)
        if kind not in ("tensor", "array"):
            raise TypeError(f"the values of a ragged column are a tensor or an array of (T, ...), not {_described(values)}")
        try:
            found = int64_vector(offsets, kind)
        except (TypeError, ValueError) as error:
            raise type(error)(f"offsets of a ragged column: {error}") from error
        if not len(found) or found[0] != 0 or found[-1] != len(values) or (found[1:] < found[:-1]).any():
            shown = ", ".join(map(str, found[:8].tolist())) + (", ..." if len(found) > 8 else "")
            raise ValueError(
                f"offsets go from 0 to the {len(values)} values without falling, one more than there are rows; got [{shown}]"
            )
        _fill(self, values, found)

    @classmethod
    def from_rows(cls, rows: Iterable[Dense]) -> Ragged:
        """Copies rows of (t, ...) each into one column; at least one, which says dtype and device.

        Raises: ValueError for no rows; TypeError, ValueError for rows that do not go together.
        """
        found = list(rows)
        if not found:
            raise ValueError("a ragged column is made of at least one row; without any, give empty values and offsets [0]")
        for index, row in enumerate(found):
            if kind_of(row) not in ("tensor", "array"):
                raise TypeError(f"row {index} of a ragged column is a tensor or an array of (t, ...), not {_described(row)}")
        return cls(_joined(found, "rows of a ragged column: "), list(itertools.accumulate(map(len, found), initial=0)))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a Ragged is frozen; {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Ragged is frozen; {name!r} cannot be deleted")

    @property
    def lengths(self) -> list[int]:
        """Length of each row."""
        offsets = self.offsets.tolist()
        return [stop - start for start, stop in itertools.pairwise(offsets)]

    def padded(self, value: float = 0, length: int | None = None) -> tuple[Any, Any]:
        """The rows as (N, L, ...), filled up behind each row with ``value``, and the mask (N, L) bool of what is there.

        ``length`` is L; the longest row's when None. Raises: ValueError where a row is longer.
        """
        lengths = self.lengths
        longest = max(lengths, default=0)
        size = longest if length is None else length
        if longest > size:
            raise ValueError(f"a row has {longest} values, which do not fit a length of {size}")
        shape = (len(lengths), size, *self.values.shape[1:])
        values: Any = self.values
        if kind_of(values) == "tensor":
            import torch

            full: Any = torch.full(shape, value, dtype=values.dtype, device=values.device)
            there: Any = torch.arange(size)[None, :] < torch.tensor(lengths, dtype=torch.int64)[:, None]
            mask: Any = there.to(values.device)
            if values.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch (2.13) cannot assign these by a mask
                signed = getattr(torch, str(values.dtype).removeprefix("torch.u"))
                full.view(signed)[mask] = values.view(signed)
                return full, mask
        else:
            import numpy as np

            full = np.full(shape, value, dtype=values.dtype)
            mask = np.arange(size)[None, :] < np.array(lengths, dtype=np.int64)[:, None]
        full[mask] = values
        return full, mask

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Dense: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> Dense | Ragged:
        """Row ``index`` as a view of (t, ...); rows of a slice without a step as a view, too."""
        num_rows = len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(num_rows)
            if step != 1:
                return _take_ragged(self, RowNumbers(range(start, stop, step), num_rows))
            return _slice_ragged(self, start, max(start, stop))
        at = operator.index(index)
        if not -num_rows <= at < num_rows:
            raise IndexError(f"row {at} of {num_rows}")
        at %= num_rows
        return self.values[int(self.offsets[at]) : int(self.offsets[at + 1])]

    def __iter__(self) -> Iterator[Dense]:
        return (self.values[start:stop] for start, stop in itertools.pairwise(self.offsets.tolist()))

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, values {tuple(self.values.shape)} {self.values.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _ragged, (self.values, self.offsets)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _ragged, (own(self.values), own(self.offsets))


def _fill(column: Ragged, values: Dense, offsets: Dense) -> None:
    object.__setattr__(column, "values", values)
    object.__setattr__(column, "offsets", offsets)


def _ragged(values: Any, offsets: Any) -> Ragged:
    """A ragged column of parts that are known to agree."""
    made = Ragged.__new__(Ragged)
    _fill(made, values, offsets)
    return made


def kind_of(value: Any) -> str:
    """'tensor', 'array', 'list' or 'ragged'; '' for what cannot be a column. Nothing is imported to find out."""
    if isinstance(value, list):
        return "list"
    if isinstance(value, Ragged):
        return "ragged"
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return "tensor" if value.layout is torch.strided and not value.is_nested and value.dim() else ""
    if numpy is not None and isinstance(value, numpy.ndarray):
        # Joining masked arrays with NumPy's own function would drop their masks.
        return "array" if value.ndim and not isinstance(value, numpy.ma.MaskedArray) else ""
    return ""


def slice_of(column: Column, start: int, stop: int) -> Column:
    """Rows ``start`` to ``stop``: a view, or a shorter list."""
    return _slice_ragged(column, start, stop) if isinstance(column, Ragged) else column[start:stop]


def _slice_ragged(column: Ragged, start: int, stop: int) -> Ragged:
    first, last = int(column.offsets[start]), int(column.offsets[stop])
    return _ragged(column.values[first:last], column.offsets[start : stop + 1] - first)


def take(column: Column, rows: GivenRows) -> Column:
    """These rows, copied, in their order. Raises: as RowNumbers."""
    found = rows if isinstance(rows, RowNumbers) else RowNumbers(rows, len(column))
    if isinstance(column, list):
        return [column[row] for row in found.numbers]
    if isinstance(column, Ragged):
        return _take_ragged(column, found)
    dense: Any = column
    taken: Column = dense[_beside(dense, found.vector(kind_of(column)))]
    return taken


def _take_ragged(column: Ragged, rows: RowNumbers) -> Ragged:
    kind = kind_of(column.values)
    module = sys.modules["torch" if kind == "tensor" else "numpy"]
    repeated = module.repeat_interleave if kind == "tensor" else module.repeat
    index, offsets, values = rows.vector(kind), column.offsets, column.values
    starts: Any = offsets[index]
    lengths = offsets[index + 1] - starts
    ends = lengths.cumsum(0)
    moved = starts - (ends - lengths)  # how far each row's values were from where they come to lie
    at = module.arange(int(ends[-1]) if len(ends) else 0) + repeated(moved, lengths)
    return _ragged(values[_beside(values, at)], module.concatenate([offsets[:1], ends]))


def _beside(column: Any, index: Any) -> Any:
    """An index on the device of what it is used on."""
    return index.to(column.device) if kind_of(column) == "tensor" else index


def concat_columns(columns: Sequence[Column], where: str = "") -> Column:
    """One column of all rows; the column itself where there is only one.

    Args:
        where: the beginning of an error's message.
    Raises: TypeError for columns of different kinds or dtypes, ValueError for different shapes of a row or devices.
    """
    kinds = {kind_of(column) for column in columns}
    if len(kinds) > 1 or "" in kinds:
        raise TypeError(f"{where}parts of different kinds: {', '.join(dict.fromkeys(map(_described, columns)))}")
    if len(columns) == 1:
        return columns[0]
    kind = kinds.pop()
    if kind == "list":
        return [row for column in columns for row in column]
    if kind != "ragged":
        return _joined(columns, where)
    ragged = [column for column in columns if isinstance(column, Ragged)]
    values = concat_columns([column.values for column in ragged], where)
    ends = itertools.accumulate((len(column.values) for column in ragged[:-1]), initial=0)
    offsets = [ragged[0].offsets[:1], *(column.offsets[1:] + end for column, end in zip(ragged, ends, strict=True))]
    return _ragged(values, _joined(offsets, where))


def _joined(parts: Sequence[Any], where: str) -> Dense:
    """Tensors, or arrays, one behind the other."""
    facts: list[tuple[type[Exception], str, set[Any]]] = [
        (TypeError, "kinds", {kind_of(part) for part in parts}),
        (TypeError, "dtypes", {part.dtype for part in parts}),
        (ValueError, "shapes of a row", {tuple(part.shape[1:]) for part in parts}),
        (ValueError, "devices", {getattr(part, "device", None) for part in parts}),
    ]
    for error, what, found in facts:
        # Texts of different lengths have different dtypes in NumPy, which joins them all the same.
        if len(found) > 1 and not (what == "dtypes" and {getattr(dtype, "kind", "") for dtype in found} in ({"U"}, {"S"})):
            raise error(f"{where}parts of different {what}: {', '.join(sorted(map(str, found)))}")
    if kind_of(parts[0]) == "tensor":
        import torch

        return torch.cat(list(parts))
    import numpy as np

    dtypes = facts[1][2]
    return np.concatenate(parts, dtype=dtypes.pop() if len(dtypes) == 1 else None)  # else it makes the byte order native


def own(column: Any) -> Any:
    """The column, or a copy of a tensor that is a view of something larger, which torch would pickle whole."""
    if kind_of(column) == "tensor" and column.untyped_storage().nbytes() > column.numel() * column.element_size():
        return column.clone()
    return column


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal in every element, type, dtype, shape and device; NaN equals NaN."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, Ragged):
        return same(first.values, second.values) and same(first.offsets, second.offsets)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    try:
        if hasattr(first, "equals"):  # a Batch, a data frame
            return bool(first.equals(second))
        if not (hasattr(first, "dtype") and hasattr(first, "shape")):
            return bool(first == second) or bool(first != first and second != second)
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        if first.dtype == object:
            return same(first.tolist(), second.tolist())
        if getattr(first, "device", None) != getattr(second, "device", None):
            return False
        equal = (first == second) | ((first != first) & (second != second))
        return bool(equal.all() if hasattr(equal, "all") else equal)  # NumPy's texts compare as Python's
    except Exception:  # noqa: BLE001 - the values' own __eq__ runs here, and may raise anything
        return False


def _described(value: Any) -> str:
    kind = kind_of(value)
    return kind or f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
