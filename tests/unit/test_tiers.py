"""Tests that each test belongs to the tier that CONTRIBUTING.md names for its folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit import conftest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def tier_table() -> dict[str, str]:
    """Rows of the table of tiers: command -> content."""
    section = GUIDE.partition("## Test tiers\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section, re.MULTILINE))


def recipe(target: str) -> str:
    """Lines that make runs for a target."""
    found = re.search(rf"^{target}:[^\n]*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
    assert found, f"no target {target} in the Makefile"
    return found.group(1)


def folders_with_tests() -> set[str]:
    return {
        path.relative_to(TESTS).parts[0]
        for path in TESTS.rglob("test_*.py")
        if path.parent != TESTS
    }


def test_table_names_every_folder_once() -> None:
    table = tier_table()
    named = {
        tier: set(re.findall(r"`tests/(\w+)`", table[f"make {tier}"])) - {"contract", "vllm"}
        for tier in ("unit", "test", "nightly")
    }
    assert named["unit"] == {"unit"}
    assert named["nightly"] == {"nightly"}
    assert named["test"] == folders_with_tests() - {"unit", "contract", "nightly", "vllm"}


@pytest.mark.parametrize("command", [each for each in tier_table() if each.startswith("make ")])
def test_command_of_table_is_a_target(command: str) -> None:
    assert recipe(command.removeprefix("make "))


@pytest.mark.parametrize(
    ("target", "selection"),
    [
        ("unit", "tests/unit $"),
        ("check", "tests/unit tests/contract --backends inline $"),
        (
            "test",
            "tests $(patsubst %,--ignore tests/%,unit nightly vllm) --backends local,ray-smoke $",
        ),
        ("nightly-rooms", "tests/nightly $"),
        ("nightly-ray", "tests/contract --backends ray $"),
        ("nightly-uvloop", "tests/contract --backends inline,local $"),
        ("test-vllm", "tests/vllm $"),
    ],
)
def test_target_selects_its_folders(target: str, selection: str) -> None:
    assert selection in recipe(target)


def test_paths_of_tests_exist() -> None:
    """Pages, settings and sources that name a test file name an existing one."""
    command = ["git", "grep", "-ohE", r"\btests(/\w+)+\.py\b", "--", ":!CHANGELOG.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    of_readers = {"tests/test_my_scheduler.py"}
    missing = [each for each in set(done.stdout.split()) if not (ROOT / each).exists()]
    assert set(missing) <= of_readers


def test_tests_have_no_mark_for_their_duration() -> None:
    mark = re.compile(r"\bmark\.slow\b")
    assert [str(path) for path in TESTS.rglob("*.py") if mark.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("import torch\ndef test_it(): pass", "ERROR collecting test_it.py"),
        ("def test_it(): import torch", "ERROR at teardown of test_it"),
        ("def test_it(): pass", "1 passed"),
    ],
    ids=["on collection", "in a test", "no import"],
)
def test_unit_test_that_imports_torch_fails(text: str, outcome: str, tmp_path: Path) -> None:
    shutil.copy(conftest.__file__, tmp_path)
    (tmp_path / "torch.py").touch()
    (tmp_path / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    done = subprocess.run(
        [*command, "-c", "/dev/null", tmp_path], capture_output=True, text=True, check=False
    )
    assert outcome in done.stdout
    assert ("imports a heavy package" in done.stdout) == ("import torch" in text)
