"""Tests of RecoverableTraining for moments of background saves that the day tests leave out."""

from __future__ import annotations

import pytest

from tests.controller.recovery_world import Losses, Start, check_background_saves


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("moment", "rank"), [("save", 1), ("loss", 0)])
def test_recovery_with_background_saves(
    start: Start, unbroken: Losses, moment: str, rank: int
) -> None:
    training = check_background_saves(start, unbroken, moment, rank)
    assert moment != "save" or training.begun == [1, 3]
