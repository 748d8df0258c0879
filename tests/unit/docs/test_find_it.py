"""Test that the places in the table "Find it" of CONTRIBUTING.md exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import pytest

from tests.docs.snippets import ROOT

SECTION = (ROOT / "CONTRIBUTING.md").read_text().partition("## Find it\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| ([^|]+\?) \| `([^`]+)` \| `([^`]+)` \|$", SECTION, re.MULTILINE)


def defined(body: Iterable[ast.stmt], name: str) -> bool:
    """Whether statements define a class, function, method (``Channel._resume``) or constant."""
    first, _, rest = name.partition(".")
    for each in body:
        match each:
            case ast.ClassDef(name=found) if found == first:
                return not rest or defined(each.body, rest)
            case (
                ast.FunctionDef(name=found)
                | ast.AsyncFunctionDef(name=found)
                | ast.AnnAssign(target=ast.Name(id=found))
            ) if found == name:
                return True
    return False


def test_twenty_questions_have_one_place_each() -> None:
    assert len(ROWS) == len({question for question, _, _ in ROWS}) == 20


@pytest.mark.parametrize(("question", "path", "name"), ROWS)
def test_file_defines_name(question: str, path: str, name: str) -> None:
    assert defined(ast.parse((ROOT / path).read_text()).body, name), f"{question} {path}: {name}"
