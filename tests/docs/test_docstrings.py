"""Test that docstrings of the public surface describe arguments and results."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

MODULES = [
    "helmsman",
    "helmsman.agents",
    "helmsman.policies",
    "helmsman.recipes",
    "helmsman.testing",
    "helmsman.weights",
    "helmsman.worker_groups",
]
NOT_CONSTRUCTED = {"helmsman.agents.AgentSession"}
"""Classes whose objects users receive; their constructors need no description."""


def is_ours(value: Any) -> bool:
    return getattr(value, "__module__", "").startswith("helmsman")


def own_parameters(function: Callable[..., Any]) -> list[str]:
    return [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.name not in ("self", "cls")
    ]


def public_callables() -> Iterator[tuple[str, str, list[str], bool]]:
    """Yield name, docstring, parameters, and whether there is a result, of each callable."""
    seen: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value) or not is_ours(value) or id(value) in seen:
                continue
            seen.add(id(value))
            path = f"{module_name}.{name}"
            if not inspect.isclass(value):
                yield path, inspect.getdoc(value) or "", own_parameters(value), returns(value)
                continue
            constructor = vars(value).get("__init__")
            is_own = inspect.isfunction(constructor) and is_ours(constructor)
            if constructor is not None and is_own and path not in NOT_CONSTRUCTED:
                parameters = own_parameters(constructor)
                yield path, inspect.getdoc(value) or "", parameters, False
            for method_name, _ in inspect.getmembers(value):
                method = inspect.getattr_static(value, method_name)
                function = getattr(method, "__func__", method)
                if method_name.startswith("_") or not inspect.isfunction(function):
                    continue
                if is_ours(function):
                    doc = doc_of(value, method_name)
                    yield (
                        f"{path}.{method_name}",
                        doc,
                        own_parameters(function),
                        returns(function),
                    )


def doc_of(owner: type, method: str) -> str:
    """Return the docstring with arguments of a method, or of a method that it overrides."""
    docs = [
        inspect.getdoc(vars(base)[method]) or "" for base in owner.__mro__ if method in vars(base)
    ]
    return next((doc for doc in docs if "Args:" in doc), docs[0])


def returns(function: Callable[..., Any]) -> bool:
    return inspect.signature(function).return_annotation not in (None, "None")


def missing_parts(doc: str, parameters: list[str], returns: bool) -> list[str]:
    """Return the parts that a docstring in Google's style lacks."""
    if len(parameters) < 2:
        return []
    _, args, rest = doc.partition("Args:\n")
    described, *sections = re.split(r"\n(?=\S)", rest)
    missing = [] if args else ["Args:"]
    missing += [
        name
        for name in parameters
        if args and not re.search(rf"^\s+\*{{0,2}}{name}\b.*:", described, re.MULTILINE)
    ]
    if returns and not any(each.startswith(("Returns:", "Yields:")) for each in sections):
        missing.append("Returns:")
    return missing


def test_public_callables_describe_arguments_and_results() -> None:
    """Callables of two or more parameters have Args: and, if they have a result, Returns:."""
    found = {
        path: missing
        for path, doc, parameters, result in public_callables()
        if (missing := missing_parts(doc, parameters, result))
    }
    assert not found
