"""What a policy may say, and how many recoveries it allows when."""

from __future__ import annotations

from typing import Any

import pytest

from helmsman.controller._training.recovery_policy import RecoveryBudget, RecoveryPolicy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"save_every": 0}, "save_every is 0; expected 1 or more"),
        ({"num_kept": 0}, "num_kept is 0; expected 1 or more"),
        ({"max_recoveries": -1}, "max_recoveries is -1; expected 0 or more"),
        ({"pause_s": float("nan")}, "pause_s is nan; expected 0 or more"),
        ({"window_s": 0.0}, "window_s is 0; expected more than 0"),
        ({"probe_every_s": 5.0, "dead_s": 4.0}, "probe_every_s 5 and dead_s 4 must be in this order"),
        ({"probe_every_s": 0.0}, "probe_every_s 0 and dead_s 60 must be in this order, and above 0"),
    ],
)
def test_what_makes_no_sense_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecoveryPolicy(**{"checkpoints": "checkpoints", "save_every": 10, **fields})


def test_pauses_double_within_the_window_and_the_budget_comes_back() -> None:
    budget = RecoveryBudget(RecoveryPolicy(checkpoints="", save_every=1, max_recoveries=3, window_s=100.0, pause_s=0.5))
    assert [budget.spend(now) for now in (0.0, 10.0, 20.0)] == [0.5, 1.0, 2.0]
    assert budget.spend(99.0) is None
    assert budget.num_recent(99.0) == 3
    assert budget.spend(100.0) == 2.0, "the first is out of the window"
    assert budget.spend(105.0) is None
    assert budget.spend(300.0) == 0.5


def test_a_budget_of_none() -> None:
    budget = RecoveryBudget(RecoveryPolicy(checkpoints="", save_every=1, max_recoveries=0))
    assert budget.spend(0.0) is None
    assert budget.num_recent(0.0) == 0
