"""What type checkers say of right and wrong uses of worker groups."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_name("typing_cases.py")


@pytest.mark.slow
@pytest.mark.timeout(600)  # without a cache, mypy reads every library that the cases import
def test_mypy_errors_of_typing_cases() -> None:
    expected = {
        number: set(match.group(1).split(", "))
        for number, line in enumerate(CASES.read_text().splitlines(), 1)
        if (match := re.search(r"# error: ([\w, -]+)$", line))
    }
    assert len(expected) > 15, "the cases are there"
    command = [sys.executable, "-m", "mypy", "--no-pretty", "--show-error-codes", str(CASES)]
    told = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False
    )
    found: defaultdict[int, set[str]] = defaultdict(set)
    for line in told.stdout.splitlines():
        if match := re.search(r"^([^:]+):(\d+): error: .*\[([\w-]+)\]$", line):
            assert Path(match.group(1)).name == CASES.name, line
            found[int(match.group(2))].add(match.group(3))
    assert dict(found) == expected, told.stdout + told.stderr
