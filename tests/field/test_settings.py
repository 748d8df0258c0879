"""Reports about settings that do nothing."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import helmsman.recipes
from helmsman.recipes import settings
from helmsman.recipes.command import RECIPES, recipe_of
from helmsman.recipes.config import all_keys

FOLDER = Path(helmsman.recipes.__file__).parent


def names_read() -> set[str]:
    """Return the attributes that recipes and losses read, but for the settings' own module."""
    found = set[str]()
    for path in (*FOLDER.rglob("*.py"), *(FOLDER.parent / "engines" / "losses").rglob("*.py")):
        if path == Path(settings.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


def test_settings_are_read() -> None:
    """open-instruct #1823: a setting is declared and documented, and nothing reads it.

    tests/nightly/field/test_settings.py changes each of them and requires a difference.
    """
    own: Any = ast.parse(Path(settings.__file__).read_text())
    by_properties = {
        node.attr
        for function in ast.walk(own)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
    }
    keys = {key for command in RECIPES for key, *_ in all_keys(recipe_of(command).kind)}
    assert len(keys) > 130
    read = names_read() | by_properties
    assert {key for key in keys if key.rpartition(".")[2] not in read} == set()
