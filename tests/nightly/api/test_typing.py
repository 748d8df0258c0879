"""Test the errors that mypy reports for right and wrong uses of worker groups."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT / "tests" / "api" / "typing_cases.py"


@pytest.mark.timeout(600)  # without a cache, mypy reads every library that the cases import
def test_mypy_errors_of_typing_cases() -> None:
    expected = {
        number: set(match.group(1).split(", "))
        for number, line in enumerate(CASES.read_text().splitlines(), 1)
        if (match := re.search(r"# error: ([\w, -]+)$", line))
    }
    assert len(expected) > 15, "the file has its cases"
    command = [sys.executable, "-m", "mypy", "--no-pretty", "--show-error-codes", str(CASES)]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False
    )
    found: defaultdict[int, set[str]] = defaultdict(set)
    for line in ran.stdout.splitlines():
        if match := re.search(r"^([^:]+):(\d+): error: .*\[([\w-]+)\]$", line):
            assert Path(match.group(1)).name == CASES.name, line
            found[int(match.group(2))].add(match.group(3))
    assert dict(found) == expected, ran.stdout + ran.stderr
