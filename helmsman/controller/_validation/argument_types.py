"""Checks argument types of public methods in the caller, before a message is numbered or sent."""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import math
import numbers
import reprlib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ForwardRef, Literal, TypeVar, Union, cast, get_args, get_origin

F = TypeVar("F", bound=Callable[..., Any])

Test = Callable[[Any], bool]


def checked(function: F) -> F:
    """Return a public function that checks its arguments against its annotations.

    The function raises TypeError for a wrong type, naming the function, the argument, the value and
    the annotation. It raises ValueError for nan. The items of built-in collections are checked if
    the annotation gives their class.
    """
    signature: list[_Signature] = []

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not signature:
            # On the first call: annotations may name classes defined further down in the module.
            signature.append(_Signature(function))
        signature[0].check(args, kwargs)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            check(args, kwargs)
            return await function(*args, **kwargs)

        return cast(F, awaited)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return function(*args, **kwargs)

    return cast(F, called)


def refusal(method: str, argument: str, value: object, expected: str, hint: str = "") -> TypeError:
    """Return the error for an argument of the wrong type; ``hint`` lacks its final full stop."""
    observed = f"{reprlib.repr(value)} (of type {type(value).__qualname__})"
    step = f" {hint}." if hint else ""
    return TypeError(
        f"{method}: the argument {argument} is {observed}, expected {expected}. Nothing was "
        f"sent.{step}"
    )


def _hint(function: str, argument: str, value: object) -> str:
    if (function, argument) != ("create_engine", "engine_name"):
        return ""
    return (
        "The engine's name, or None for the worker's id, comes before the constructor's arguments: "
        f'create_engine(worker, engine, "counter", {reprlib.repr(value)})'
    )


def require_seconds(method: str, timeout: object, name: str = "timeout") -> None:
    """Raise TypeError unless the limit ``name`` is a number or None, and ValueError for nan."""
    if timeout is None:
        return
    if not _is_number(timeout):
        raise refusal(method, name, timeout, "float | None, a number of seconds")
    if math.isnan(cast(float, timeout)):
        raise ValueError(
            f"{method}: {name}=nan is not a number of seconds; leave it out for Timeouts.call_s"
        )


class _Signature:
    """The checks of one function's arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function.__name__
        names = _Names(inspect.unwrap(function).__globals__)
        self._positional: list[str] = []
        self._tests: dict[str, tuple[str, Test]] = {}
        """Argument name -> its annotation and test."""
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if parameter.kind is not parameter.KEYWORD_ONLY:
                self._positional.append(name)
            annotation = parameter.annotation
            if (
                annotation is not parameter.empty
                and (test := _test_of(eval(annotation, {}, names))) is not None
            ):
                self._tests[name] = annotation, test

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Not strict: Python itself raises for missing or surplus arguments.
        by_position = zip(self._positional, args, strict=False)
        for name, value in itertools.chain(by_position, kwargs.items()):
            annotation, test = self._tests.get(name, ("", None))
            if test is not None and not test(value):
                raise refusal(
                    self._function, name, value, annotation, _hint(self._function, name, value)
                )
            if test is not None and isinstance(value, float) and math.isnan(value):
                raise ValueError(f"{self._function}: the argument {name} is nan, expected a number")


class _Names(dict[str, Any]):
    """Names of a module; names imported only for type checkers become forward references."""

    def __init__(self, module: Mapping[str, Any]) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module.get(name) or getattr(builtins, name, None) or ForwardRef(name)


def _test_of(annotation: Any, depth: int = 1) -> Test | None:
    """Return a test of values against an annotation; None if it cannot be tested."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any or annotation is object or isinstance(annotation, TypeVar):
        return None
    if annotation is None or annotation is types.NoneType:
        return lambda value: value is None
    if isinstance(annotation, ForwardRef):
        return functools.partial(_has_class_named, annotation.__forward_arg__)
    if origin in (Union, types.UnionType):
        tests = [_test_of(each, depth) for each in arguments]
        known = [test for test in tests if test is not None]
        return None if len(known) < len(tests) else lambda value: any(test(value) for test in known)
    if origin is Literal:  # the method itself checks the value
        return _test_of(type(arguments[0]))
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    kind = origin or annotation
    if kind is type:
        return lambda value: isinstance(value, type)
    if kind is Callable:
        return callable
    if kind in (Sequence, Collection):
        item = arguments[0]
        may_be_string = str in (item, *get_args(item))
        return functools.partial(
            _is_collection, kind is Sequence, may_be_string, _item_test(item, depth)
        )
    return lambda value: isinstance(value, kind)


def _item_test(annotation: Any, depth: int) -> Test | None:
    """Return a test of a container's items; None unless the annotation names plain classes.

    Nested containers are not tested: a prompt is a container of many items.
    """
    plain = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    are_classes = all(isinstance(each, type) and get_origin(each) is None for each in plain)
    return _test_of(annotation, depth - 1) if depth and are_classes else None


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


_SCALARS: dict[Any, Test] = {int: _is_integer, float: _is_number}
"""Tests of numeric annotations: NumPy numbers pass, booleans do not."""


_PLAIN_COLLECTIONS = (list, tuple, range, set, frozenset)
"""Collections whose items are checked; other types may be slow to iterate."""


def _has_class_named(name: str, value: Any) -> bool:
    return any(cls.__name__ == name for cls in type(value).__mro__)


def _is_collection(is_ordered: bool, may_be_text: bool, item_test: Test | None, value: Any) -> bool:
    """Return whether a value has a length or, if ``is_ordered``, items by index, like arrays."""
    if isinstance(value, (str, bytes, bytearray)):
        return may_be_text and isinstance(value, str)
    if isinstance(value, Mapping) or not hasattr(
        value, "__len__" if not is_ordered else "__getitem__"
    ):
        return False
    if item_test is None or not isinstance(value, _PLAIN_COLLECTIONS):
        return True
    # The test depends on an item's class alone: one item of each class suffices for long prompts.
    one_of_each = dict(zip(map(type, value), value, strict=True))
    return all(map(item_test, one_of_each.values()))
