"""Explicit checks of arguments, before a message is numbered or sent.

They cover values that would otherwise pass for others: True as a count, NaN as a limit.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from typing import cast


def refusal(method: str, argument: str, value: object, expected: str, hint: str = "") -> TypeError:
    """Return the error for an argument of the wrong type; ``hint`` lacks its final full stop."""
    observed = f"{reprlib.repr(value)} (of type {type(value).__qualname__})"
    step = f" {hint}." if hint else ""
    return TypeError(
        f"{method}: the argument {argument} is {observed}, expected {expected}. Nothing was "
        f"sent.{step}"
    )


def require_seconds(method: str, timeout: object, name: str = "timeout") -> None:
    """Raise TypeError unless the limit ``name`` is a number or None, and ValueError for nan."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise refusal(method, name, timeout, "float | None, a number of seconds")
    if math.isnan(cast(float, timeout)):
        raise ValueError(
            f"{method}: {name}=nan is not a number of seconds; leave it out for the default"
        )


def require_integer(method: str, name: str, value: object) -> None:
    """Raise TypeError unless a value is an integer, NumPy's included, and no bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise refusal(method, name, value, "int")
