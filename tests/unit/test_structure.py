"""Test the structure of the code: sizes, depth of inheritance, privacy and import cycles."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import size
from tests.unit.test_imports import ROOT, SOURCES, imports_of, module_name, tree_of

MAX_LINES = 800
MAX_METHODS = 40
MAX_DEPTH = 2
"""Limit of our classes in a chain of inheritance, not counting contracts."""

BUDGETS = {"helmsman": 52_910, "tests": 61_350}
"""Limits of the lines of code, which fall with each removal. A commit that raises one says why."""
MAX_SHARE = 0.15
"""Limit of a room's share of the code; the engines may be larger."""

FACADES = {"helmsman/api/scheduler.py", "helmsman/controller/_rollout/rollout_controller.py"}
"""Modules whose docstrings do not count as lines, since they are the API reference."""

NOT_OURS = {"tracker._fd"}
"""Private members of other libraries with names of ours."""

SCHEDULERS = {"BackendScheduler", "LocalScheduler", "RayScheduler", "InlineScheduler"}


class Class(NamedTuple):
    module: str
    node: ast.ClassDef

    @property
    def methods(self) -> list[str]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [each.name for each in self.node.body if isinstance(each, kinds)]


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return syntax trees by module; they are parsed on use, since every test process imports this
    module.
    """
    return {module_name(path): tree_of(path) for path in SOURCES}


def all_classes() -> Iterator[Class]:
    """Yield all classes but those of compat, which share names with ours."""
    for module, tree in trees().items():
        if not module.startswith("helmsman.compat."):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    yield Class(module, node)


@functools.cache
def classes() -> dict[str, Class]:
    """Return classes by name."""
    return {each.node.name: each for each in all_classes()}


def bases_of(name: str) -> list[str]:
    def text(base: ast.expr) -> str:
        return ast.unparse(base.value if isinstance(base, ast.Subscript) else base).rpartition(".")[
            2
        ]

    return [text(base) for base in classes()[name].node.bases]


def all_methods(name: str) -> set[str]:
    """Return the methods of a class and of our classes that it inherits from, except contracts."""
    own = set(classes()[name].methods)
    return own.union(
        *(
            all_methods(base)
            for base in bases_of(name)
            if base in classes() and not is_contract(base)
        )
    )


def is_contract(name: str) -> bool:
    return classes()[name].module.startswith("helmsman.api.")


def depth(name: str) -> int:
    """Count our classes from this one up to a contract, this one included."""
    return 1 + max(
        (depth(base) for base in bases_of(name) if base in classes() and not is_contract(base)),
        default=0,
    )


def num_docstring_lines(tree: ast.Module) -> int:
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def test_modules_max_lines() -> None:
    lines = {}
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        facade = num_docstring_lines(tree_of(path)) if name in FACADES else 0
        lines[name] = len(path.read_text().splitlines()) - facade
    assert not {name: n for name, n in lines.items() if n > MAX_LINES}


def test_code_within_budgets() -> None:
    rooms = size.sizes()
    found = {"tests": rooms.pop("tests"), "helmsman": sum(rooms.values())}
    assert not {name: n for name, n in found.items() if n > BUDGETS[name]}
    del rooms["helmsman/engines"]
    assert not {name: n for name, n in rooms.items() if n > MAX_SHARE * found["helmsman"]}


def test_examples_max_lines() -> None:
    lines = {
        path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").rglob("*.py")
    }
    assert lines
    assert not {name: n for name, n in lines.items() if n > 300}


def test_classes_max_methods() -> None:
    large = {
        name: n
        for name in classes()
        if not is_contract(name) and (n := len(all_methods(name))) > MAX_METHODS
    }
    assert not large


def test_class_names_are_used_once() -> None:
    modules: dict[str, list[str]] = {}
    for each in all_classes():
        modules.setdefault(each.node.name, []).append(each.module)
    assert not {name: found for name, found in modules.items() if len(found) > 1}


def test_inheritance_max_depth() -> None:
    deep = {
        name: n for name in classes() if not is_contract(name) and (n := depth(name)) > MAX_DEPTH
    }
    assert not deep


def test_modules_no_import_cycles() -> None:
    def imported(path: Path) -> Iterator[str]:
        for _, name in imports_of(path):
            yield from (known for known in (name, name.rpartition(".")[0]) if known in trees())

    graph = {module_name(path): set(imported(path)) - {module_name(path)} for path in SOURCES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_controllers_no_scheduler_kinds() -> None:
    wrong = [
        f"{module}:{node.lineno} {ast.unparse(node)}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"isinstance", "issubclass"}
        and {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)} & SCHEDULERS
    ]
    assert not wrong, "\n".join(wrong)


def private_names(tree: ast.Module) -> set[str]:
    """Return the private attributes and methods that the classes of a module define."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(each.name)
                elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                    if each.value.id in {"self", "cls"}:
                        names.add(each.attr)
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    names.add(each.target.id)
                elif isinstance(each, ast.Assign):
                    names.update(
                        target.id for target in each.targets if isinstance(target, ast.Name)
                    )
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_private_members_used_in_own_module() -> None:
    ours: dict[str, set[str]] = {}
    for module, tree in trees().items():
        for name in private_names(tree):
            ours.setdefault(name, set()).add(module)
    wrong = [
        f"{module}:{node.lineno} {ast.unparse(node)} of {', '.join(sorted(ours[node.attr]))}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ours
        and module not in ours[node.attr]
        and ast.unparse(node.value) not in {"self", "cls", "super()"}
        and ast.unparse(node) not in NOT_OURS
    ]
    assert not wrong, "\n".join(wrong)
