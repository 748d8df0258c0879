"""Checks argument names of engines and losses against their source.

The source is parsed, not imported, since the driver imports no torch. If the source does not show
the names, as with forwarded arguments, nothing is refused here and the worker checks them.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, TypeAlias

from helmsman.api.engines import LossFn
from helmsman.api.errors import InvalidSpecError
from helmsman.api.suggestions import did_you_mean

_LOSSES = "helmsman.engines.losses"
_NUM_GIVEN = 2
"""Arguments that our engines pass to a loss by position (outputs, batch); they are not suggested.
"""
_MAX_HOPS = 8
"""Maximum number of imports to follow to the definition of a name."""

_Definition: TypeAlias = ast.ClassDef | ast.FunctionDef


def require_engine_arguments(
    role: str, engine: str | type[Any], arguments: Mapping[str, Any]
) -> None:
    """Check the keyword arguments of an engine's constructor.

    Raises:
        InvalidSpecError: The constructor is known not to take an argument.
    """
    known = _engine_arguments(engine) if arguments else None
    for name, value in arguments.items():
        if known is not None and name not in known:
            shown = engine.rpartition(".")[2] if isinstance(engine, str) else engine.__qualname__
            raise InvalidSpecError(
                role=role,
                field=f"the engine's argument {name!r}",
                value=value,
                expected=f"an argument of {shown}: {did_you_mean(name, known)}",
            )


def require_loss_settings(loss: LossFn | str, settings: Mapping[str, Any] | None) -> None:
    """Check the settings (keyword arguments) of a loss.

    Raises:
        ValueError: The loss is known not to take a setting.
    """
    known = _loss_settings(loss) if settings else None
    for name in settings or ():
        if known is not None and name not in known:
            shown = loss if isinstance(loss, str) else getattr(loss, "__name__", repr(loss))
            raise ValueError(
                f"loss {shown!r} has no setting {name!r}; {did_you_mean(name, known[_NUM_GIVEN:])}"
            )


def _engine_arguments(engine: str | type[Any]) -> list[str] | None:
    if isinstance(engine, type):
        if (known := _signature_names(engine)) is not None:
            return known
        engine = f"{engine.__module__}.{engine.__qualname__}"
    module, _, name = engine.rpartition(".")
    place, definition = _definition(module, name) or ("", None)
    return _class_arguments(place, definition) if isinstance(definition, ast.ClassDef) else None


def _loss_settings(loss: LossFn | str) -> list[str] | None:
    """Return the names of all arguments, positional ones included; None if they are unknown."""
    if not isinstance(loss, str):
        return _signature_names(loss)
    module, _, name = loss.rpartition(".")
    if not module:
        module, name = _LOSSES, _short_names().get(loss, "")
    found = _definition(module, name)
    if found is None or not isinstance(found[1], ast.FunctionDef):
        return None
    function = found[1]
    wrappers = [
        each for each in function.decorator_list if not ast.unparse(each).startswith("loss_traits(")
    ]
    return None if function.args.kwarg is not None or wrappers else _parameters(function)


def _signature_names(function: Any) -> list[str] | None:
    """Return the parameter names; None if any name is accepted, or the signature is unknown.

    For a decorated function these are the decorator's own parameters, since a wrapper may take more
    arguments than the function that it wraps.
    """
    try:
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]


def _class_arguments(module: str, definition: ast.ClassDef) -> list[str] | None:
    """Return the names of a constructor's arguments; None if they are unknown.

    A constructor ``(self, config: Config | None = None, **fields)`` takes the fields of that
    struct.
    """
    function = next(
        (
            each
            for each in definition.body
            if isinstance(each, ast.FunctionDef) and each.name == "__init__"
        ),
        None,
    )
    if (
        function is None
        or definition.keywords
        or definition.decorator_list
        or function.decorator_list
    ):
        return None
    named = _parameters(function)[1:]
    if function.args.kwarg is None:
        return named
    annotation = function.args.args[-1].annotation if named == ["config"] else None
    config, optional, _ = (
        ast.unparse(annotation).partition(" | None") if annotation is not None else ("", "", "")
    )
    found = _definition(module, config) if optional else None
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    is_struct = [ast.unparse(base).rpartition(".")[2] for base in found[1].bases] == ["Struct"]
    is_struct = is_struct and all(
        keyword.arg not in (None, "rename") for keyword in found[1].keywords
    )
    fields = [
        each.target.id
        for each in found[1].body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    return [*fields, *named] if is_struct else None


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [
        each.arg
        for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    ]


def _short_names() -> dict[str, str]:
    tree = _source(_LOSSES)
    for node in tree.body if tree is not None else ():
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "LOSSES"
            and isinstance(node.value, ast.Dict)
        ):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {
                str(key.value): ast.unparse(value)
                for key, value in pairs
                if isinstance(key, ast.Constant)
            }
    return {}


def _definition(module: str, name: str) -> tuple[str, _Definition] | None:
    """Find a class or function through re-exports; return its module and definition."""
    for _ in range(_MAX_HOPS):
        tree = _source(module)
        hop: tuple[str, str] | None = None
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                hop = next(
                    (
                        (node.module, each.name)
                        for each in node.names
                        if (each.asname or each.name) == name
                    ),
                    hop,
                )
        if hop is None:
            return None
        module, name = hop
    return None


def _source(module: str) -> ast.Module | None:
    """Parse a module's source without importing it; None if it is not found."""
    try:
        path = _path_of(module)
        return _parsed(path, os.stat(path).st_mtime_ns) if path is not None else None
    except (ImportError, OSError, SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=64)
def _parsed(path: str, _changed_ns: int) -> ast.Module:
    return ast.parse(Path(path).read_bytes())


def _path_of(module: str) -> str | None:
    path: str | None
    if module in sys.modules:
        path = getattr(sys.modules[module], "__file__", None)
    else:
        spec = _spec_of(module)
        path = spec.origin if spec is not None else None
    return path if path is not None and path.endswith(".py") else None


def _spec_of(module: str) -> ModuleSpec | None:
    """Locate a module without importing its packages.

    The finder of an editable install locates only the top-level package, so submodules are searched
    with PathFinder.
    """
    package = module.rpartition(".")[0]
    if not package:
        return importlib.util.find_spec(module)
    if package in sys.modules:
        return PathFinder.find_spec(module, getattr(sys.modules[package], "__path__", []))
    parent = _spec_of(package)
    return (
        PathFinder.find_spec(module, parent.submodule_search_locations or [])
        if parent is not None
        else None
    )
