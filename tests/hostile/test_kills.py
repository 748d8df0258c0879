"""Tests that kills at random points lose and repeat no call, and leave nothing behind."""

from __future__ import annotations

import pytest

from tests.hostile.kill_rounds import DAY_SEEDS, Play, play

__all__ = ["play"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", DAY_SEEDS)
def test_kill(play: Play, seed: int) -> None:
    play("local", seed)
