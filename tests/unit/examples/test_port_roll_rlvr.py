"""Test the port of a ROLL pipeline, examples/port_roll_rlvr.py, on the inline scheduler."""

from __future__ import annotations

import pytest

from examples.port_roll_rlvr import main
from helmsman import make_scheduler
from tests.examples.roll_port import rewards


def test_port_roll_rlvr_learns() -> None:
    with make_scheduler("inline", num_gpus=8) as scheduler:
        found = rewards(scheduler, seed=0)
    assert found[0] < 0.2 and sum(found[-3:]) / 3 > 0.9, found


def test_port_roll_rlvr_shows_colocation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scheduler", "inline", "--steps", "2", "--seed", "5"]) == 0
    printed = capsys.readouterr().out.splitlines()
    third = next(line for line in printed if line.startswith("3 "))
    assert all(f"{role} since" in third for role in ("actor_train/3", "actor_infer/1", "critic/1"))
    assert [line[:7] for line in printed[-2:]] == ["step  0", "step  1"]
