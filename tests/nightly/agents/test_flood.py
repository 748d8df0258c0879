"""Test that a gateway under a flood of hostile peers serves its agents, and the script goes on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.agents.flood import KINDS
from tests.agents.flooded_script import NUM_FILES, NUM_TURNS

NUM_PEERS = 1500


@pytest.mark.parametrize("kinds", [[*KINDS], ["silent"], ["slow"], ["large body"]], ids=str)
def test_flood(kinds: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.agents.flooded_script", str(NUM_PEERS), *kinds],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for moment in ("turns before", "turns", "turns after restart"):
        assert found[moment] == 2 * NUM_TURNS
    assert (found["flood"], found["served"]) == ("ready", "")
    assert found["workers"] == 3
    assert found["files"] < NUM_FILES * 3 / 4
    assert found["grown bytes"] < 50e6
    lines = found["log"].splitlines()
    assert len(lines) <= 3, lines
    assert "was refused" in lines[0]
