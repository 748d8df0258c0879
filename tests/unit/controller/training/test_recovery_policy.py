"""Which policies of recovery are refused."""

from __future__ import annotations

from typing import Any

import pytest

from helmsman.controller._training.recovery import RecoveryPolicy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"save_every": 0}, "save_every is 0; expected 1 or more"),
        ({"num_kept": 0}, "num_kept is 0; expected 1 or more"),
        ({"max_recoveries": -1}, "max_recoveries is -1; expected 0 or more"),
        ({"pause_s": float("nan")}, "pause_s is nan; expected 0 or more"),
        ({"window_s": 0.0}, "window_s is 0; expected more than 0"),
        (
            {"probe_every_s": 5.0, "dead_s": 4.0},
            "probe_every_s is 5 and dead_s 4; expected 0 < probe_every_s <= dead_s",
        ),
        (
            {"probe_every_s": 0.0},
            "probe_every_s is 0 and dead_s 60; expected 0 < probe_every_s <= dead_s",
        ),
    ],
)
def test_recovery_policy_refuses_invalid_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecoveryPolicy(**{"checkpoints": "checkpoints", "save_every": 10, **fields})
