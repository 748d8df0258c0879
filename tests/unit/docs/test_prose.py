"""Test that sources, tests and documentation use plain words."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.docs.snippets import ROOT

REJECTED = re.compile(
    r"\b(anew|(?<!of )nobody|whoever|whatsoever|thereof|of\s+late|mourners?|strangers?"
    r"|lets?\s+go\s+of|letting\s+go\s+of|com(?:es?|ing)\s+to\s+nothing)\b",
    re.IGNORECASE,
)
"""Words of which each has a plainer one; a file "of nobody" belongs to the account of that name."""
SEPARATORS = re.compile(r"_|\n\s*(#|\||-|>)?\s*")
"""Between the words of an identifier, and at the ends of lines of prose and comments."""


def tracked_texts() -> list[str]:
    files = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.txt", "*.toml", "*.yml", "Makefile"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return [name for name in files if name != "tests/unit/docs/test_prose.py"]


def rejected_words(text: str) -> list[str]:
    return [found.group() for found in REJECTED.finditer(SEPARATORS.sub(" ", text))]


@pytest.mark.parametrize(
    "text",
    [
        "Nobody waits.",
        "# let go\n    # of the lock",
        "def begin_anew():",
        "mourners = set()",
        "a start that comes to\nnothing",
    ],
)
def test_rejected_words_are_found(text: str) -> None:
    assert len(rejected_words(text)) == 1


def test_sources_and_docs_use_plain_words() -> None:
    found = {
        name: words
        for name in tracked_texts()
        if (words := rejected_words((ROOT / name).read_text()))
    }
    assert not found
