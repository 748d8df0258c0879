"""Checks that engines share: of their configuration, and of whether they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def config_from(kind: type[T], config: T | None, fields: Mapping[str, Any]) -> T:
    """Return an engine's configuration, given as a whole or by its fields.

    Args:
        kind: Its type.
        config: The configuration; None if fields are given.
        fields: Its fields by name; empty if ``config`` is given.

    Raises:
        ValueError: Both are given, a field is unknown, or a value has the wrong type
            (msgspec.ValidationError).
    """
    if config is None:
        return msgspec.convert(fields, kind)
    if fields:
        raise ValueError(
            f"give either a {kind.__name__} or its fields, not both (fields: {', '.join(fields)})"
        )
    return config


def require_new(engine: str, *, is_used: bool) -> None:
    """Raise RuntimeError if an engine that is initialized is running, or was destroyed."""
    if is_used:
        raise RuntimeError(
            f"initialize() was called on a {engine} that is running or destroyed; make a new one"
        )


def running(engine: str, part: T | None) -> T:
    """Return a part that an engine has while it runs; raises RuntimeError if it has none."""
    if part is None:
        raise RuntimeError(
            f"the {engine} is not running; call initialize() first, and nothing after destroy()"
        )
    return part
