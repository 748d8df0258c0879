"""Columns of a Batch: tensors, NumPy arrays, lists and ragged rows.

torch and NumPy are imported only if a value needs them. Slices of tensors, arrays and ragged
columns are views of the same memory.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, overload

if TYPE_CHECKING:
    import numpy as np
    import torch

Dense: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
"""A tensor or array whose first dimension is the rows."""
Column: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | list[Any] | Ragged"
"""The values of one column of a batch, one per row."""
GivenRows: TypeAlias = "Sequence[int] | np.ndarray[Any, Any] | torch.Tensor"
"""Integers in a sequence, array or tensor of one dimension, negative ones from the end; or a mask
with one boolean per row.
"""


class Frozen:
    """Base of values whose attributes are set once.

    A plain pickle of such a value contains no memory beyond its own.
    """

    __slots__ = ()

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} is frozen; {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} is frozen; {name!r} cannot be deleted")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The codec calls __reduce__ itself, because it sends a view without its storage.
        reduced: Any = self.__reduce__()
        return reduced[0], tuple(map(own, reduced[1]))


class Ragged(Frozen):
    """Rows of different lengths in one contiguous block of memory.

    Row i is ``values[offsets[i]:offsets[i + 1]]``, as in torch's jagged nested tensors. It is
    frozen, like a Batch. ``torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True)``
    converts it to a padded tensor.

    Args:
        values: (T, ...), the rows one after another; not copied.
        offsets: (N + 1,) integers; copied.

    Raises:
        ValueError: The offsets do not match the values.
        TypeError: ``values`` is not a tensor or array, or the offsets are not integers.
    """

    __slots__ = ("offsets", "values")

    values: Dense
    """(T, ...), the rows one after another."""
    offsets: Dense
    """(N + 1,) int64 on the host, of the same library as ``values``; non-decreasing from 0 to T."""

    def __init__(self, values: Dense, offsets: Dense | Sequence[int]) -> None:
        _require_dense(values, "the values of a ragged column are")
        try:
            found = _integers(offsets)
        except TypeError as error:
            raise TypeError(f"offsets of a ragged column: {error}") from error
        if (
            not found
            or found[0] != 0
            or found[-1] != len(values)
            or any(map(operator.gt, found, found[1:]))
        ):
            raise ValueError(
                f"offsets are [{shown(found)}]; expected non-decreasing numbers from 0 to "
                f"{len(values)}, the number of values"
            )
        self._fill(values=values, offsets=_vector(values, found, "int64"))

    @classmethod
    def from_rows(cls, rows: Iterable[Dense]) -> Ragged:
        """Copy rows of shape (t, ...) into one column.

        The first row sets dtype and device.

        Raises:
            ValueError: There are no rows, or their shapes or devices differ.
            TypeError: A row is not a tensor or array, or their kinds or dtypes differ.
        """
        found = list(rows)
        if not found:
            raise ValueError(
                "from_rows needs at least one row; for an empty column, use Ragged(values, [0]) "
                "with empty values"
            )
        for index, row in enumerate(found):
            _require_dense(row, f"row {index} of a ragged column is")
        return cls(
            _joined(found, "rows of a ragged column: "),
            list(itertools.accumulate(map(len, found), initial=0)),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Dense: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> Dense | Ragged:
        """Return a row (t, ...) as a view, or the rows of a slice, as a view if it has no step."""
        if not isinstance(index, slice):
            at = row_number(index, len(self))
            return self.values[int(self.offsets[at]) : int(self.offsets[at + 1])]
        start, stop, step = index.indices(len(self))
        if step != 1:
            taken: Ragged = take(self, range(start, stop, step))
            return taken
        stop = max(start, stop)
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return _ragged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def __iter__(self) -> Iterator[Dense]:
        return (
            self.values[start:stop] for start, stop in itertools.pairwise(self.offsets.tolist())
        )

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, values {tuple(self.values.shape)} {self.values.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _ragged, (self.values, self.offsets)


def _ragged(values: Any, offsets: Any) -> Ragged:
    """Create a ragged column from parts that are known to match."""
    made = Ragged.__new__(Ragged)
    made._fill(values=values, offsets=offsets)
    return made


def _require_dense(value: Any, what: str) -> None:
    if kind_of(value) not in ("tensor", "array"):
        raise TypeError(f"{what} a tensor or an array of (t, ...), not {_described(value)}")


def _vector(like: Dense, values: list[Any], dtype: str) -> Any:
    """Create a vector on the host, in the library of ``like``."""
    if kind_of(like) == "tensor":
        torch = sys.modules["torch"]
        return torch.tensor(values, dtype=getattr(torch, dtype))
    return sys.modules["numpy"].array(values, dtype=dtype)


def kind_of(value: Any) -> str:
    """Return 'tensor', 'array', 'list' or 'ragged', or '' if the value cannot be a column.

    Imports nothing.
    """
    if isinstance(value, list):
        return "list"
    if isinstance(value, Ragged):
        return "ragged"
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return (
            "tensor"
            if value.layout is torch.strided and not value.is_nested and value.dim()
            else ""
        )
    if numpy is not None and isinstance(value, numpy.ndarray):
        # NumPy's concatenate drops the mask of masked arrays.
        return "array" if value.ndim and not isinstance(value, numpy.ma.MaskedArray) else ""
    return ""


def check_column(name: str, value: Any) -> None:
    """Raise TypeError unless a value can be a column."""
    if kind_of(value):
        return
    if getattr(value, "is_nested", False):
        raise TypeError(
            f"column {name!r} is a nested tensor; make a Ragged of its values() and offsets()"
        )
    kind = (
        "tensor or array without dimensions"
        if getattr(value, "shape", None) == ()
        else type(value).__qualname__
    )
    raise TypeError(
        f"column {name!r} is a {kind}; a column is a tensor or array with at least one dimension, "
        "neither sparse nor masked, a "
        "list, a tuple or a Ragged. Put values that belong to all rows in meta"
    )


def flags_beside(columns: Iterable[Column], flags: list[bool]) -> Column:
    """Return flags as a tensor on the device of the columns' first tensor.

    Without tensors, they are an array if there are arrays, else the list.
    """
    dense: list[Any] = [each.values if isinstance(each, Ragged) else each for each in columns]
    for kind in ("tensor", "array"):
        for values in dense:
            if kind_of(values) == kind:
                made = _vector(values, flags, "bool")
                mask: Column = made.to(values.device) if kind == "tensor" else made
                return mask
    return flags


# --- rows -----------------------------------------------------------------------------------------


def row_numbers(given: Any, num_rows: int) -> list[int]:
    """Convert GivenRows to row numbers counted from the start.

    Args:
        given: The rows.
        num_rows: Number of rows of the batch.

    Returns:
        Row numbers.

    Raises:
        TypeError: It is not one dimension of integers or booleans.
        IndexError: A row does not exist, or the mask has another length.
    """
    try:
        found = list(_plain(given))
    except TypeError as error:
        raise TypeError(
            f"rows are given as integers or a mask, not as {_described(given)} {given!r}"[:120]
        ) from error
    if "bool" in str(getattr(given, "dtype", "")) or (
        found and all(isinstance(each, bool) for each in found)
    ):
        if len(found) != num_rows:
            raise IndexError(f"the mask has {len(found)} entries for {num_rows} rows")
        return [number for number, flag in enumerate(found) if flag]
    return _within(_integers(found), num_rows)


def row_number(given: Any, num_rows: int) -> int:
    """Convert one row index to a number counted from the start.

    Raises:
        TypeError: It is not an integer.
        IndexError: The row does not exist.
    """
    return _within(_integers([given]), num_rows)[0]


def _within(numbers: list[int], num_rows: int) -> list[int]:
    wrong = [number for number in numbers if not -num_rows <= number < num_rows]
    if wrong:
        raise IndexError(f"row {wrong[0]} does not exist; there are {num_rows} rows")
    return [number % num_rows for number in numbers]


def _integers(given: Any) -> list[int]:
    numbers = list(_plain(given))
    if set(map(type, numbers)) <= {int}:
        return numbers
    numbers = list(map(_plain, numbers))
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"expected an integer, got {number!r}")
    return numbers


def _plain(value: Any) -> Any:
    """Convert NumPy and torch numbers to Python numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def rows_by_value(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Group row numbers by value, in the order of their first rows; all NaN count as one value."""
    groups: dict[Any, list[int]] = {}
    try:
        for row, value in enumerate(values):
            groups.setdefault(
                math.nan if isinstance(value, float) and value != value else value, []
            ).append(row)
    except TypeError as error:
        raise TypeError(
            f"group_by needs hashable values: {error}; give group_by a function of the row"
        ) from error
    return groups


def shown(numbers: Sequence[int]) -> str:
    """Format the first few numbers, for a message."""
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def take(column: Column, rows: Sequence[int]) -> Any:
    """Copy rows in the order of ``rows``, which are numbers from ``row_numbers``."""
    if isinstance(column, list):
        return [column[row] for row in rows]
    if not isinstance(column, Ragged):
        return column[_vector(column, list(rows), "int64")]
    values = column.values
    offsets = column.offsets
    index = _vector(column.values, list(rows), "int64")
    is_tensor = kind_of(values) == "tensor"
    module = sys.modules["torch" if is_tensor else "numpy"]
    starts: Any = offsets[index]
    lengths = offsets[index + 1] - starts
    ends = lengths.cumsum(0)
    # Offset of each row's values from their position in the result.
    moved = starts - (ends - lengths)
    each = module.repeat_interleave(moved, lengths) if is_tensor else module.repeat(moved, lengths)
    at = module.arange(int(ends[-1]) if len(ends) else 0) + each
    return _ragged(values[at], module.concatenate([offsets[:1], ends]))


def concat_columns(columns: Sequence[Column], where: str = "") -> Column:
    """Concatenate columns.

    Args:
        columns: Columns of the same kind.
        where: Prefix of the error message.

    Returns:
        One column of all rows.

    Raises:
        TypeError: Kinds or dtypes differ.
        ValueError: Row shapes or devices differ.
    """
    kinds = {kind_of(column) for column in columns}
    if len(kinds) > 1 or "" in kinds:
        raise TypeError(
            f"{where}parts differ in kinds: {', '.join(dict.fromkeys(map(_described, columns)))}"
        )
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
    offsets = [
        ragged[0].offsets[:1],
        *(column.offsets[1:] + end for column, end in zip(ragged, ends, strict=True)),
    ]
    return _ragged(values, _joined(offsets, where))


def fill_rows(columns: Sequence[Any], value: Any) -> list[Any]:
    """Fill up the rows of tensors or arrays with a value, so that all have the same shape.

    Raises:
        TypeError: A column is neither a tensor nor an array.
        ValueError: The rows have different numbers of dimensions.
    """
    if any(kind_of(column) not in ("tensor", "array") for column in columns):
        kinds = ", ".join(dict.fromkeys(map(_described, columns)))
        raise TypeError(f"only rows of tensors and arrays can be padded; got {kinds}")
    shapes = [tuple(column.shape[1:]) for column in columns]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(f"rows with different numbers of dimensions cannot be padded: {shapes}")
    largest = tuple(map(max, zip(*shapes, strict=True)))
    filled = []
    for column, shape in zip(columns, shapes, strict=True):
        if shape != largest:
            size = (len(column), *largest)
            if kind_of(column) == "tensor":
                wider = column.new_full(size, value)
            else:
                wider = sys.modules["numpy"].full(size, value, dtype=column.dtype)
            wider[(slice(None), *map(slice, shape))] = column
            column = wider
        filled.append(column)
    return filled


def _joined(parts: Sequence[Any], where: str) -> Dense:
    facts: list[tuple[type[Exception], str, set[Any]]] = [
        (TypeError, "kinds", {kind_of(part) for part in parts}),
        (TypeError, "dtypes", {part.dtype for part in parts}),
        (ValueError, "row shapes", {tuple(part.shape[1:]) for part in parts}),
        (ValueError, "devices", {getattr(part, "device", None) for part in parts}),
    ]
    for error, what, found in facts:
        # NumPy strings of different lengths have different dtypes but can be concatenated.
        if len(found) > 1 and not (
            what == "dtypes" and {getattr(dtype, "kind", "") for dtype in found} in ({"U"}, {"S"})
        ):
            raise error(f"{where}parts differ in {what}: {', '.join(sorted(map(str, found)))}")
    if kind_of(parts[0]) == "tensor":
        tensor: Dense = sys.modules["torch"].cat(list(parts))
        return tensor
    dtypes = facts[1][2]  # Without dtype=, NumPy changes the byte order to native.
    array: Dense = sys.modules["numpy"].concatenate(
        parts, dtype=dtypes.pop() if len(dtypes) == 1 else None
    )
    return array


# --- values ---------------------------------------------------------------------------------------


def own(value: Any) -> Any:
    """Copy a tensor that is a view of a larger storage, which torch would pickle whole.

    Other values are returned unchanged; the tensors in a dict are copied, too.
    """
    if isinstance(value, dict):
        return {name: own(each) for name, each in value.items()}
    if (
        kind_of(value) == "tensor"
        and value.untyped_storage().nbytes() > value.numel() * value.element_size()
    ):
        return value.clone()
    return value


def same(first: Any, second: Any) -> bool:
    """Compare every element, type, dtype, shape and device; NaN equals NaN."""
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
        if hasattr(first, "equals"):  # A Batch or a data frame.
            return bool(first.equals(second))
        if not (hasattr(first, "dtype") and hasattr(first, "shape")):
            return bool(first == second) or bool(first != first and second != second)
        facts = [
            (each.dtype, each.shape, getattr(each, "device", None)) for each in (first, second)
        ]
        if facts[0] != facts[1]:
            return False
        if first.dtype == object:
            return same(first.tolist(), second.tolist())
        equal = (first == second) | ((first != first) & (second != second))
        # NumPy string scalars compare to a Python bool, which has no all().
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except Exception:  # noqa: BLE001 - the values' own __eq__ runs here, and may raise anything
        return False


def _described(value: Any) -> str:
    return kind_of(value) or f"{type(value).__module__}.{type(value).__qualname__}".removeprefix(
        "builtins."
    )
