"""Test that sources, tests and documentation use plain words."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator

from tests.docs.snippets import ROOT

REJECTED = re.compile(
    r"\b(anew|(?<!of )nobody|whoever|whatsoever|thereof|of\s+late|mourners?|strangers?"
    r"|lets?\s+go\s+of|letting\s+go\s+of|com(?:es?|ing)\s+to\s+nothing)\b",
    re.IGNORECASE,
)
"""Words with a plainer synonym. In messages, a file "of nobody" belongs to that account."""
SEPARATORS = re.compile(r"_|\n\s*(#|\||-|>)?\s*")
"""Separators of the words of an identifier, and ends of lines of prose and comments."""
OPENING = re.compile(
    r"^\s*[rR]?\"{3}\s*"
    r"((?:What|Who|Whom|Whose|Whoever|Whatever|Which|Where|How|Those|Of|As)\b[^\n]*)",
    re.MULTILINE,
)
"""Openings of docstrings that have no subject, such as those of clauses used as nouns."""


@functools.cache
def tracked_texts() -> dict[str, str]:
    """Return the tracked sources and pages by name, without this file."""
    patterns = ["*.py", "*.md", "*.txt", "*.toml", "*.yml", "Makefile"]
    command = ["git", "ls-files", "--deduplicate", *patterns, ":!tests/unit/docs/test_prose.py"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split()]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths if path.exists()}


def rejected_words(text: str) -> list[str]:
    return [found.group() for found in REJECTED.finditer(SEPARATORS.sub(" ", text))]


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, also those of constants and fields."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def rejected_openings(source: str) -> list[str]:
    """Return the first lines of docstrings with a rejected opening."""
    if not OPENING.search(source):  # parsing all files takes seconds
        return []
    found = (OPENING.match(f'"""{text}') for text in docstrings(ast.parse(source)))
    return [each.group(1) for each in found if each]


def test_texts_use_plain_words() -> None:
    found = {name: rejected_words(text) for name, text in tracked_texts().items()}
    assert {name: words for name, words in found.items() if words} == {}


def test_docstrings_open_with_noun_or_verb() -> None:
    sources = {name: text for name, text in tracked_texts().items() if name.endswith(".py")}
    found = {name: rejected_openings(text) for name, text in sources.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}
