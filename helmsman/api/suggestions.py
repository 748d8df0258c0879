"""Suggestions for unknown names of fields, arguments, settings and methods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

_MIN_PART = 3
"""Minimum length of a name that is suggested as a part of another name."""


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the most similar known names, best first: by beginning, abbreviation or spelling.

    Args:
        name: The unknown name.
        known: The known names.
        most: Maximum number of suggestions.

    Returns:
        The suggestions.
    """
    import difflib  # Needed for errors only.

    names = list(known)
    begun = [each for each in names if name.startswith(f"{each}_")]
    close = difflib.get_close_matches(name, names, n=most)
    related = [each for each in names if _initials(name) == each or _initials(each) == name]
    parts = [
        each
        for each in names
        if min(len(each), len(name)) >= _MIN_PART and (each in name or name in each)
    ]
    return list(dict.fromkeys([*begun, *related, *close, *parts]))[:most]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest name, or all known names.

    Args:
        name: The unknown name.
        known: The known names.

    Returns:
        Text such as "did you mean 'role'?".
    """
    names = list(known)
    near = nearest(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"


def _initials(name: str) -> str:
    parts = name.split("_")
    return "".join(part[:1] for part in parts) if len(parts) > 1 else ""


class Suggesting(msgspec.StructMeta):
    """Metaclass of user-facing structs: the error for an unknown field suggests the nearest one."""

    if not TYPE_CHECKING:  # Type checkers derive the signature from the fields.

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Create the struct; the TypeError for an unknown field suggests the nearest one."""
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                unknown = [name for name in kwargs if name not in self.__struct_fields__]
                if not unknown:
                    raise
                hint = did_you_mean(unknown[0], self.__struct_fields__)
            raise TypeError(f"{self.__name__} has no field {unknown[0]!r}; {hint}")
