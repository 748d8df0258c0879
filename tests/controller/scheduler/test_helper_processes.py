"""Test that a run has the helper processes that docs/architecture.md lists, and no others."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.unit.test_imports import ROOT

HELPERS = {
    "forkserver": r"helmsman: forkserver|_ray_forks.forkserver import",
    "watcher": "helmsman: watcher",
    "guardian": "helmsman: guardian of",
    "client": "_ray_forks/client.py",
    "observer": "_server.observer import",
    "guard": "process_guard.py",
}
"""Helper -> pattern of its command line."""
OTHERS = "ray::|/gcs_server |/raylet |helmsman: counter/"
"""Ray's own processes, and workers."""


def name_of(line: str) -> str:
    """Return the helper of a command line, 'other' for those of Ray and workers, or the line."""
    for name, pattern in [*HELPERS.items(), ("other", OTHERS)]:
        if re.search(pattern, line):
            return name
    return line


def listed() -> dict[str, str]:
    """Return the helpers of the page, with the runs in which they occur."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| helper |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE))


def test_page_lists_helpers() -> None:
    assert set(listed()) == set(HELPERS)


@pytest.mark.parametrize(("kind", "place"), [("local", "local"), ("ray", "embedded Ray")])
def test_helpers_of_a_run(kind: str, place: str) -> None:
    program = [sys.executable, "-m", "tests.controller.scheduler.helper_processes", kind]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = {name_of(line) for line in done.stdout.splitlines()}
    assert found - {"other"} == {name for name, runs in listed().items() if place in runs}
    assert len(found - {"other"}) <= 4
