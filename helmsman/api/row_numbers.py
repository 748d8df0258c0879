"""Row numbers: which rows an operation takes, checked once, in the form that each kind of column wants.

torch and NumPy are loaded only where a column needs them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch

GivenRows: TypeAlias = "Sequence[int] | np.ndarray[Any, Any] | torch.Tensor | RowNumbers"
"""Integers in a sequence, array or tensor of one dimension, negative ones from the end; or as many booleans as there are rows,
which are a mask."""


class RowNumbers:
    """Numbers of rows, each within the rows that there are, counted from the start."""

    __slots__ = ("_array", "_tensor", "numbers")

    numbers: list[int]

    def __init__(self, given: GivenRows, num_rows: int) -> None:
        """Raises: TypeError for what is not one dimension of integers or booleans; IndexError for rows that are not there, or a
        mask of another length."""
        self._array: Any = None
        self._tensor: Any = None
        numbers = _as_list(given)
        if "bool" in str(getattr(given, "dtype", "")) or (numbers and isinstance(numbers[0], bool)):
            numbers = _masked(numbers, num_rows)
        elif type(given) is not range and not isinstance(given, RowNumbers):
            numbers = _integers(numbers)
        if numbers:
            lowest, highest = min(numbers), max(numbers)
            if lowest < -num_rows or highest >= num_rows:
                raise IndexError(f"row {highest if highest >= num_rows else lowest} of {num_rows}")
            if lowest < 0:
                numbers = [number % num_rows for number in numbers]
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"RowNumbers({self.numbers})"

    @property
    def array(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(K,) int64."""
        if self._array is None:
            self._array = int64_vector(self.numbers, "array")
        made: np.ndarray[Any, np.dtype[np.int64]] = self._array
        return made

    @property
    def tensor(self) -> torch.Tensor:
        """(K,) int64 on the host."""
        if self._tensor is None:
            self._tensor = int64_vector(self.numbers, "tensor")
        made: torch.Tensor = self._tensor
        return made

    def vector(self, kind: str) -> Any:
        """The tensor for kind 'tensor', else the array."""
        return self.tensor if kind == "tensor" else self.array


def int64_vector(numbers: Any, kind: str) -> Any:
    """A new int64 vector on the host: a tensor for kind 'tensor', else an array.

    Args:
        numbers: a sequence, array or tensor of integers, with one dimension.
    Raises: TypeError for what is not one dimension of integers; ValueError for integers that 64 bits do not hold.
    """
    if hasattr(numbers, "dtype") and not (_are_integers(numbers.dtype) and len(numbers.shape) == 1):
        raise TypeError(f"integers in one dimension are needed, not {_described(numbers)}")
    if hasattr(numbers, "astype"):
        numbers = numbers.astype("int64", order="C")
    elif hasattr(numbers, "dtype"):
        numbers = numbers.to("cpu", sys.modules["torch"].int64, copy=True)
    else:
        numbers = _integers(list(numbers))
    try:
        if kind == "tensor":
            import torch

            return torch.from_numpy(numbers) if hasattr(numbers, "astype") else torch.as_tensor(numbers, dtype=torch.int64)
        import numpy as np

        return np.asarray(numbers, dtype=np.int64)
    except (OverflowError, RuntimeError, ValueError) as error:  # torch has its own ways to say it
        raise ValueError(f"integers of at most 64 bits are needed: {error}") from error


def _are_integers(dtype: Any) -> bool:
    return dtype.kind in "iu" if hasattr(dtype, "kind") else str(dtype).startswith(("torch.int", "torch.uint"))


def _as_list(given: GivenRows) -> list[Any]:
    if isinstance(given, RowNumbers):
        return given.numbers
    shape = getattr(given, "shape", None)
    if shape is not None and len(shape) != 1:
        raise TypeError(f"rows are told by integers or a mask in one dimension, not by {_described(given)}")
    if shape is not None and 0 in shape:
        return []  # an empty array is of floats unless it is told otherwise
    if isinstance(given, (str, bytes, bytearray)):
        raise TypeError(f"rows are told by integers or a mask, not by {given!r}")
    try:
        return list(given.tolist() if hasattr(given, "tolist") else given)
    except TypeError as error:
        raise TypeError(f"rows are told by integers or a mask, not by {_described(given)}") from error


def _masked(flags: Sequence[Any], num_rows: int) -> list[int]:
    if not all(isinstance(flag, bool) for flag in flags):
        raise TypeError("rows are told by integers or by booleans (a mask), not by both at once")
    if len(flags) != num_rows:
        raise IndexError(f"a mask of {len(flags)} rows for {num_rows} rows")
    return [number for number, flag in enumerate(flags) if flag]


def _integers(numbers: list[Any]) -> list[int]:
    return numbers if set(map(type, numbers)) <= {int} else list(map(_as_integer, numbers))


def _as_integer(number: Any) -> int:
    if isinstance(number, bool):
        raise TypeError("rows are told by integers or by booleans (a mask), not by both at once")
    try:
        return operator.index(number)
    except TypeError as error:
        raise TypeError(f"an integer is needed, not {number!r}") from error


def _described(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"{value.dtype} of shape {tuple(getattr(value, 'shape', ()))}"
    return f"{type(value).__qualname__} {value!r}"[:80]
