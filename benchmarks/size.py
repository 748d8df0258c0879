"""Lines of code by room: lines with tokens, without docstrings, comments and blank lines.

    python -m benchmarks.size       # or: make size

The string after an attribute, which documents it, counts as a docstring.
"""

from __future__ import annotations

import ast
import collections
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of(source: str) -> int:
    """Count the lines of code of a module.

    Args:
        source: Its text.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def room_of(path: Path) -> str:
    """Return the room of a module of ours; each sub-package of ``controller`` is one.

    Args:
        path: The module's path from the root of the repository.
    """
    parts = path.parts[:-1]
    return "/".join(parts[: 3 if parts[:2] == ("helmsman", "controller") else 2])


def sizes() -> dict[str, int]:
    """Return the lines of code of each room of ``helmsman``, and of ``tests`` as a whole."""
    found = collections.Counter[str]()
    for path in sorted((ROOT / "helmsman").rglob("*.py")):
        found[room_of(path.relative_to(ROOT))] += lines_of(path.read_text())
    for path in (ROOT / "tests").rglob("*.py"):
        found["tests"] += lines_of(path.read_text())
    return dict(found)


def main() -> None:
    """Print the table."""
    found = sizes()
    tests = found.pop("tests")
    for room, number in sorted(found.items(), key=lambda each: -each[1]):
        print(f"{number:7,}  {number / sum(found.values()):4.0%}  {room}")
    print(f"{sum(found.values()):7,}        helmsman\n{tests:7,}        tests")


if __name__ == "__main__":
    main()
