"""Short soak test of a rollout on processes; tests/nightly has the long one."""

from __future__ import annotations

from pathlib import Path

from tests.controller.rollout.soak import run_and_check


def test_soak_each_request_has_one_end(tmp_path: Path) -> None:
    run_and_check(tmp_path, seed=2, num=500, gap_divisor=3)
