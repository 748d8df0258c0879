"""Columns of a Batch: tensors, NumPy arrays, lists, and ragged rows. torch and NumPy are loaded only where a value needs them.

Slices of tensors, arrays and ragged columns are views of the same memory.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch

Dense: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
"""A tensor or array whose first dimension is the rows."""
Column: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | list[Any] | Ragged"
"""What a batch has under one name: a value for each row."""


class Ragged:
    """Rows of different lengths in one piece of memory.

    Row i is ``values[offsets[i]:offsets[i + 1]]``, as in torch's jagged nested tensors.
    """

    __slots__ = ("offsets", "values")

    values: Dense
    """(T, ...), the rows one after another."""
    offsets: Dense
    """(N + 1,) int64 on the host, of the same library as ``values``; from 0 to T, never falling."""

    def __init__(self, values: Dense, offsets: Dense | Sequence[int]) -> None:
        """Raises: ValueError for offsets that do not describe the values, TypeError for values that are neither a tensor nor an
        array."""
        if kind_of(values) not in ("tensor", "array"):
            raise TypeError(f"the values of a ragged column are a tensor or an array of (T, ...), not {_described(values)}")
        found = [int(offset) for offset in (offsets.tolist() if hasattr(offsets, "tolist") else offsets)]
        if not found or found[0] != 0 or found[-1] != len(values) or any(a > b for a, b in itertools.pairwise(found)):
            shown = f"{found[:8]}{'...' if len(found) > 8 else ''}"
            raise ValueError(
                f"offsets go from 0 to the {len(values)} values without falling, one more than there are rows; got {shown}"
            )
        self.values = values
        self.offsets = _integers_like(values, found)

    @classmethod
    def from_rows(cls, rows: Sequence[Dense]) -> Ragged:
        """Copies rows of (t, ...) each into one column; at least one, which says dtype and device."""
        if not rows:
            raise ValueError("a ragged column is made of at least one row; without any, give empty values and offsets [0]")
        offsets = [0]
        for row in rows:
            offsets.append(offsets[-1] + len(row))
        values = concat_columns(list(rows))
        assert not isinstance(values, (list, Ragged))
        return cls(values, offsets)

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
        if kind_of(self.values) == "tensor":
            import torch

            full: Any = torch.full(shape, value, dtype=self.values.dtype, device=self.values.device)
            mask: Any = torch.arange(size)[None, :] < torch.tensor(lengths, dtype=torch.int64)[:, None]
            mask = mask.to(full.device)
        else:
            import numpy as np

            full = np.full(shape, value, dtype=self.values.dtype)
            mask = np.arange(size)[None, :] < np.array(lengths, dtype=np.int64)[:, None]
        full[mask] = self.values
        return full, mask

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Dense:
        """Row ``index`` as a view of (t, ...)."""
        num_rows = len(self)
        if not -num_rows <= index < num_rows:
            raise IndexError(f"row {index} of {num_rows}")
        at = index % num_rows
        return self.values[int(self.offsets[at]) : int(self.offsets[at + 1])]

    def __iter__(self) -> Iterator[Dense]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, values {tuple(self.values.shape)} {self.values.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _ragged, (self.values, self.offsets)


def _ragged(values: Dense, offsets: Dense) -> Ragged:
    """A ragged column of parts that are known to agree."""
    made = Ragged.__new__(Ragged)
    made.values, made.offsets = values, offsets
    return made


def kind_of(value: Any) -> str:
    """'tensor', 'array', 'list' or 'ragged'; '' for what cannot be a column. Nothing is imported to find out."""
    if isinstance(value, list):
        return "list"
    if isinstance(value, Ragged):
        return "ragged"
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return "tensor" if value.dim() else ""
    if numpy is not None and isinstance(value, numpy.ndarray):
        return "array" if value.ndim else ""
    return ""


def slice_of(column: Column, start: int, stop: int) -> Column:
    """Rows ``start`` to ``stop``: a view, or a shorter list."""
    if isinstance(column, Ragged):
        first, last = int(column.offsets[start]), int(column.offsets[stop])
        return _ragged(column.values[first:last], column.offsets[start : stop + 1] - first)
    return column[start:stop]


def take(column: Column, rows: Sequence[int]) -> Column:
    """These rows, copied, in their order."""
    if isinstance(column, list):
        return [column[row] for row in rows]
    if isinstance(column, Ragged):
        if not rows:
            return slice_of(column, 0, 0)
        return Ragged.from_rows([column[row] for row in rows])
    index: Any = _integers_like(column, rows)
    return column[index.to(column.device) if kind_of(column) == "tensor" else index]


def concat_columns(columns: Sequence[Column]) -> Column:
    """One column of all rows; the column itself where there is only one.

    Raises: TypeError for columns of different kinds; what torch or NumPy raise for shapes that do not go together.
    """
    kinds = {kind_of(column) for column in columns}
    if len(kinds) > 1 or "" in kinds:
        raise TypeError(f"parts of different kinds: {', '.join(dict.fromkeys(map(_described, columns)))}")
    if len(columns) == 1:
        return columns[0]
    kind = kinds.pop()
    if kind == "list":
        return [row for column in columns for row in column]
    if kind == "ragged":
        return _concat_ragged([column for column in columns if isinstance(column, Ragged)])
    dense: Any = columns
    dtypes = dict.fromkeys(str(column.dtype) for column in dense)
    if len(dtypes) > 1:
        raise TypeError(f"parts of different dtypes: {', '.join(dtypes)}")
    if kind == "tensor":
        import torch

        return torch.cat(dense)
    import numpy as np

    return np.concatenate(dense)


def _concat_ragged(columns: Sequence[Ragged]) -> Ragged:
    values = concat_columns([column.values for column in columns])
    offsets, end = [0], 0
    for column in columns:
        offsets += [end + offset for offset in column.offsets.tolist()[1:]]
        end = offsets[-1]
    assert not isinstance(values, (list, Ragged))
    return Ragged(values, offsets)


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal in every element, type, dtype and shape; NaN equals NaN."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    kind = kind_of(first)
    if kind == "ragged":
        return same(first.values, second.values) and same(first.offsets, second.offsets)
    if hasattr(first, "dtype") and hasattr(first, "shape"):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        if "torch" in type(first).__module__:
            return bool(first.device == second.device and (first.eq(second) | (first.ne(first) & second.ne(second))).all())
        equal = (first == second) | ((first != first) & (second != second))
        return bool(equal.all() if hasattr(equal, "all") else equal)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    try:
        return bool(first == second) or bool(first != first and second != second)
    except (TypeError, ValueError):
        return False


def _integers_like(values: Any, numbers: Sequence[int]) -> Any:
    """An int64 vector on the host, of the library of ``values``."""
    if kind_of(values) == "tensor":
        import torch

        return torch.tensor(numbers, dtype=torch.int64)
    import numpy as np

    return np.array(numbers, dtype=np.int64)


def _described(value: Any) -> str:
    kind = kind_of(value)
    return kind or f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
