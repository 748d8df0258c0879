"""Tests of the transitions of Health, and of SupervisionPolicy."""

from __future__ import annotations

import itertools

import pytest

from helmsman.controller._rollout.health import (
    TRANSITIONS,
    Health,
    HealthEvent,
    SupervisionPolicy,
    follow,
)

H, E = Health, HealthEvent
LEGAL = [
    (H.HEALTHY, H.HEALTHY, [E.ANSWERED, E.UPDATED]),
    (H.HEALTHY, H.SUSPECT, [E.LATE]),
    (H.SUSPECT, H.HEALTHY, [E.ANSWERED, E.UPDATED]),
    (H.SUSPECT, H.SUSPECT, [E.LATE]),
    (H.STALE, H.HEALTHY, [E.UPDATED]),
    (H.STALE, H.STALE, [E.ANSWERED, E.LATE, E.UPDATE_FAILED]),
    *((health, H.DEAD, [E.LOST, E.EVACUATED]) for health in (H.HEALTHY, H.SUSPECT, H.STALE)),
    *((health, H.STALE, [E.UPDATE_FAILED]) for health in (H.HEALTHY, H.SUSPECT)),
    (H.DEAD, H.DEAD, [E.ANSWERED, E.LATE, E.LOST, E.UPDATED, E.UPDATE_FAILED]),
    (H.DEAD, H.RESTARTING, [E.RESTART]),
    (H.RESTARTING, H.RESTARTING, [E.ANSWERED, E.LATE, E.UPDATED, E.UPDATE_FAILED]),
    (H.RESTARTING, H.DEAD, [E.LOST]),
    (H.RESTARTING, H.STALE, [E.RESTARTED]),
]
FOLLOWING = {(before, event): after for before, after, events in LEGAL for event in events}


@pytest.mark.parametrize(
    ("before", "event"),
    list(itertools.product(H, E)),
    ids=lambda value: value.value.replace(" ", "-"),
)
def test_follow(before: Health, event: HealthEvent) -> None:
    assert TRANSITIONS[before].get(event) is FOLLOWING.get((before, event))
    if (before, event) in FOLLOWING:
        assert follow(before, event) is FOLLOWING[before, event]
    else:
        message = f"in the state '{before.value}' cannot receive the event '{event.value}'"
        with pytest.raises(ValueError, match=message):
            follow(before, event)


def test_is_serving() -> None:
    assert [health for health in H if health.is_serving] == [H.HEALTHY]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probe_every_s": 0.0}, "expected 0 < probe_every_s"),
        ({"probe_every_s": 11.0}, "probe_every_s <= suspect_s"),
        ({"dead_s": 10.0}, "suspect_s < dead_s"),
        ({"max_restarts": -1}, "max_restarts is -1"),
    ],
)
def test_supervision_policy_refuses_invalid_values(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SupervisionPolicy(**options)  # type: ignore[arg-type]
