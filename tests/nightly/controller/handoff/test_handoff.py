"""Tests of DeviceHandoff on the inline scheduler, and for deaths that the day tests leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman import make_scheduler
from tests.controller.handoff_world import Pair, check_learning, check_recovery


def test_handoff_of_reinforcement_learning() -> None:
    with make_scheduler("inline") as scheduler, Pair(scheduler, "-learning") as pair:
        check_learning(pair)


@pytest.mark.parametrize("method", ["wake", "train_batch"])
def test_recover_of_a_trainer_that_dies(pair: Pair, tmp_path: Path, method: str) -> None:
    check_recovery(pair, tmp_path, method)
