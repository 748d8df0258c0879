"""Finds the code blocks of the documentation, and runs the Python blocks of a page."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r'^( *)```(\w+)(?: title="([^"]*)")?\n(.*?)^\1```$', re.DOTALL | re.MULTILINE)
OTHERS = ("TRL", "OpenRLHF reward_func.py", "AReaL")
"""Titles of code of other libraries, which is parsed and not run: they are not installed."""
ELSEWHERE = ("docs/recipes.md", "docs/testing.md")
"""Pages whose snippets other tests run: those of the examples, and of helmsman.testing."""


class Snippet(NamedTuple):
    """One code block."""

    page: Path
    line: int
    language: str
    title: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_script(self) -> bool:
        """Whether a reader saves the block and runs it."""
        return '__name__ == "__main__"' in self.code


def snippets(page: Path) -> Iterator[Snippet]:
    """Yield the code blocks of a page that name a language."""
    text = page.read_text()
    for indent, language, title, code in FENCE.findall(text):
        line = text[: text.index(code)].count("\n") + 1
        yield Snippet(
            page, line, language, title, re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        )


def python_of(page: Path) -> list[Snippet]:
    """Return the Python blocks of a page that are to run, in order."""
    return [
        each for each in snippets(page) if each.language == "python" and each.title not in OTHERS
    ]


def compiled(snippet: Snippet, code: str) -> Any:
    """Compile code with tracebacks that name page and line, and ``await`` as in a notebook."""
    padded = "\n" * (snippet.line - 1) + code
    return compile(padded, str(snippet.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def run_page(page: Path) -> None:
    """Run the blocks of a page one after another, with the names that the page assumes."""
    from tests.docs.worlds import world_of

    world = world_of(page)
    with world as names:

        async def in_a_notebook() -> None:
            for snippet, code in world.prepared(python_of(page)):
                print(f"--- {snippet.name}", flush=True)
                if inspect.iscoroutine(made := eval(compiled(snippet, code), names)):
                    await made

        if world.is_notebook:
            asyncio.run(in_a_notebook())
            return
        for snippet, code in world.prepared(python_of(page)):
            print(f"--- {snippet.name}", flush=True)
            exec(compiled(snippet, code), names)


def run_pages(pages: Sequence[Path]) -> None:
    """Run each page in a process and a folder of its own.

    The processes are forked from this one, which has imported torch: to import it takes seconds.
    """
    importlib.import_module("tests.docs.worlds")
    failed = []
    for page in pages:
        sys.stdout.flush()
        if not (pid := os.fork()):
            folder = Path(page.stem)
            folder.mkdir()
            os.chdir(folder)
            sys.path.insert(0, os.getcwd())
            run_page(page)
            return
        if os.waitpid(pid, 0)[1]:
            failed.append(page.name)
    if failed:
        sys.exit(f"these pages failed: {', '.join(failed)}")


if __name__ == "__main__":
    run_pages([Path(each) for each in sys.argv[1:]])
