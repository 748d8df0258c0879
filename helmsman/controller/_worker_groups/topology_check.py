"""What workers say of their coordinates, beside what was computed for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helmsman.api.errors import HelmsmanError, MethodNotFoundError
from helmsman.api.topology import AXES, RankInfo


def is_missing_method(error: HelmsmanError) -> bool:
    """Whether workers have no such method, and so nothing to say."""
    return isinstance(error, MethodNotFoundError) or isinstance(getattr(error, "first", None), MethodNotFoundError)


def difference(ours: RankInfo, theirs: Any) -> tuple[str, str] | None:
    """(what was computed, what the worker says) where these differ in something that it says."""
    if theirs is None:
        return None
    if isinstance(theirs, Mapping):
        named = dict(theirs)
    else:
        names = ["rank", "world_size", *(f"{axis}_{what}" for axis in AXES for what in ("rank", "size"))]
        named = {name: getattr(theirs, name) for name in names if hasattr(theirs, name)}
    wrong = [name for name, value in named.items() if getattr(ours, name, None) != value]
    if not wrong:
        return None
    shown = [
        ", ".join(f"{name}={value}" for name, value in side)
        for side in ([(name, getattr(ours, name, "unknown")) for name in wrong], [(name, named[name]) for name in wrong])
    ]
    return shown[0], shown[1]
