"""Hooks of ``mkdocs build``: the API reference is expanded from the public names of each module."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULE = re.compile(r"<!-- module: ([\w.]+) -->")
MARK = re.compile(r"<!-- names: ([\w.]+) -->")


def source_of(module: str) -> Path | None:
    """The file of a module of ours; None where there is none."""
    path = ROOT / module.replace(".", "/")
    return next(
        (each for each in (path / "__init__.py", path.with_suffix(".py")) if each.exists()), None
    )


def public_names(module: str) -> set[str]:
    """Names that a module defines as classes or imports from ours; nothing is imported for it."""
    path = source_of(module)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text() if path else "")):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("helmsman"):
            for alias in node.names:
                names |= (
                    public_names(str(node.module))
                    if alias.name == "*"
                    else {alias.asname or alias.name}
                )
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


def expanded(found: re.Match[str]) -> str:
    """A heading for each public name, with its documentation."""
    module = found[1]
    if source_of(module) is None:
        return f"`{module}` is not part of this version."
    return "\n\n".join(f"::: {module}.{name}" for name in sorted(public_names(module)))


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Expand the marks of a page."""
    return MODULE.sub(r"\n## \1\n\n::: \1\n", MARK.sub(expanded, markdown))
