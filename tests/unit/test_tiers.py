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
            "tests $(patsubst %,--ignore tests/%,nightly vllm) --backends inline,local,ray-smoke $",
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


def test_unit_test_that_imports_a_heavy_package_fails(tmp_path: Path) -> None:
    shutil.copy(conftest.__file__, tmp_path)
    for name in conftest.HEAVY:
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "test_collected.py").write_text("import torch")
    (tmp_path / "test_run.py").write_text("def test_it(): import ray")
    (tmp_path / "test_light.py").write_text("def test_it(): pass")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert "ERROR collecting test_collected.py" in done.stdout
    assert "ERROR at teardown of test_it" in done.stdout
    assert done.stdout.count("imports a heavy package") >= 2
    assert "2 passed, 2 errors" in done.stdout
