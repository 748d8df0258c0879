"""Conversion of values from NumPy, torch, OmegaConf and pathlib to plain Python."""

from __future__ import annotations

import enum
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


def plain(value: Any) -> Any:
    """Convert a value of a setting to plain Python, at any depth.

    Mappings become dicts, other sequences than tuples lists, paths texts, enum members their
    values, and numbers and arrays of NumPy or torch Python's. Any other object stays as it is.

    Args:
        value: The value.

    Returns:
        The plain value.
    """
    if value is None or type(value) in (bool, int, float, str, bytes, bytearray, memoryview):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {plain(name): plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    if isinstance(value, Sequence):
        return [plain(each) for each in value]
    if not isinstance(value, type) and callable(convert := getattr(value, "tolist", None)):
        converted = convert()
        if type(converted) is not type(value):  # as of a long double
            return plain(converted)
    if isinstance(value, numbers.Integral):
        return int(value)
    is_number = isinstance(value, numbers.Number) and not isinstance(value, complex)
    return float(value) if is_number else value


def finite(value: Any) -> float | None:
    """Convert a scalar of Python, NumPy or torch, or an array or tensor of one element, to a float.

    Args:
        value: Any object.

    Returns:
        The number; None if the value is not a number, NaN or infinite.
    """
    try:
        value = value.item() if callable(getattr(value, "item", None)) else value
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # torch raises the last one
        return None
    return number if math.isfinite(number) else None


def make_plain(struct: msgspec.Struct) -> None:
    """Convert the fields of a new struct to plain Python; for its ``__post_init__``.

    Args:
        struct: The struct.
    """
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if (converted := plain(value)) is not value:
            msgspec.structs.force_setattr(struct, name, converted)
