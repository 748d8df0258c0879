"""Temporary."""

from typing import Any


def explain(shortfall: Any, *args: Any, **kwargs: Any) -> Any:
    return shortfall
