"""Locates the part of a value that cannot be pickled, for the error message.

The walk follows pickle itself (the state and arguments from ``__reduce_ex__``), so it never reports
a field that a class deliberately leaves out of its state.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from helmsman.api.engines import SampleShare

_MAX_DEPTH = 32


def find_unpicklable(
    obj: Any, error: Exception, root: str, pickles: Callable[[Any], object]
) -> tuple[str, str, str]:
    """Find the smallest part of a value that cannot be pickled.

    Args:
        obj: The value.
        error: The exception that pickling it raised.
        root: Name of the value.
        pickles: Tries to pickle one part.

    Returns:
        The path from ``root``, such as ``args[0]['cfg'].lock``, the part's type, and the text of
        the exception that the part raised.
    """
    path, seen = root, {id(obj)}
    for _ in range(_MAX_DEPTH):
        if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
            break  # too deeply nested: each part fails in the same way
        found = _first_failing(obj, seen, pickles)
        if found is None:
            break
        label, obj, error = found
        path += label
        seen.add(id(obj))
    return path, type_name(obj), f"{type(error).__name__}: {error}"


def type_name(obj: object) -> str:
    """Name the type of a value as in source code: ``dict``, ``_thread.lock``."""
    kind = type(obj)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _first_failing(
    obj: Any, seen: set[int], pickles: Callable[[Any], object]
) -> tuple[str, Any, Exception] | None:
    # Parts that contain a seen object, such as methods that call super(), fail with any part of it.
    for label, part in sorted(_parts(obj), key=lambda each: _contains(each[1], seen)):
        if id(part) in seen:
            continue
        try:
            pickles(part)
        # The part's own __reduce__ runs here, and may raise anything.
        except Exception as exc:  # noqa: BLE001
            return label, part, exc
    return None


def _contains(part: Any, seen: set[int]) -> bool:
    return isinstance(part, types.FunctionType) and any(
        id(value) in seen for _, value in _function_parts(part)
    )


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of ``obj`` that pickle visits, each with its path from ``obj``."""
    if isinstance(obj, types.FunctionType):
        yield from _function_parts(obj)
        return
    if isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        yield ".__func__", obj.__func__
        return
    if isinstance(obj, functools.partial):
        yield ".func", obj.func
        yield from ((f".args[{index}]", value) for index, value in enumerate(obj.args))
        yield from ((f".keywords[{name!r}]", value) for name, value in obj.keywords.items())
        return
    if isinstance(obj, type):
        yield from (
            (f".{name}", value)
            for name, value in vars(obj).items()
            if not name.startswith("__") or callable(value)
        )
        return
    if isinstance(obj, msgspec.Struct):
        yield from ((f".{name}", getattr(obj, name)) for name in obj.__struct_fields__)
        return
    if isinstance(obj, Mapping):
        yield from _mapping_parts(obj)
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from _sequence_parts(obj)
    if type(obj).__module__ != "builtins":
        yield from _reduced_parts(obj)


def _mapping_parts(obj: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in obj.items():
        yield f"[{_shown(key)}]", value
    for key in obj:
        yield f".key({_shown(key)})", key


def _sequence_parts(
    obj: list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any],
) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, set | frozenset):
        yield from ((f".item({_shown(item)})", item) for item in obj)
    elif isinstance(obj, SampleShare):
        yield from ((f"[{number}]", item) for number, item in zip(obj.numbers, obj, strict=False))
    else:
        names = getattr(obj, "_fields", ())
        for index, item in enumerate(obj):
            yield (f".{names[index]}" if index < len(names) else f"[{index}]"), item


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a function pickled by value: closure, referenced globals, defaults."""
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a closure cell is still empty
        return
    for where, names in (("closure", variables.nonlocals), ("globals", variables.globals)):
        yield from ((f".<{where}>.{name}", value) for name, value in names.items())
    for index, value in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{index}]", value
    yield from (
        (f".__kwdefaults__[{name!r}]", value)
        for name, value in (function.__kwdefaults__ or {}).items()
    )
    yield from ((f".{name}", value) for name, value in vars(function).items())


def _reduced_parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the state and the arguments that the object provides to pickle."""
    try:
        reduced: object = obj.__reduce_ex__(5)
    # The object itself fails, and its error is already known.
    except Exception:  # noqa: BLE001
        return
    if not isinstance(reduced, tuple):
        return
    parts: tuple[Any, ...] = (*reduced, None, None, None)
    arguments, state, items, pairs = parts[1:5]
    for each in state if isinstance(state, tuple) else (state,):
        if isinstance(each, Mapping):
            yield from ((f".{name}", value) for name, value in each.items())
        elif each is not None:
            yield ".__getstate__()", each
    for index, argument in enumerate(arguments):
        if not (index == 0 and isinstance(argument, type)):
            yield f".__reduce__()[1][{index}]", argument
    for index, item in enumerate(items or ()):
        yield f"[{index}]", item
    for key, value in pairs or ():
        yield f"[{_shown(key)}]", value


def _shown(key: object) -> str:
    try:
        text = repr(key)
    # A key's broken __repr__ must not hide the reported error.
    except Exception:  # noqa: BLE001
        text = f"<{type_name(key)}>"
    return text if len(text) <= 40 else f"{text[:37]}..."
