"""The health of an instance: every state with every event, and Watched on a clock that the test moves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmsman.controller._generation.health import TRANSITIONS, Event, Health, SupervisionPolicy, Watched

H, E = Health, Event
LEGAL = {
    (H.HEALTHY, E.ANSWERED, H.HEALTHY),
    (H.HEALTHY, E.LATE, H.SUSPECT),
    (H.HEALTHY, E.LOST, H.DEAD),
    (H.HEALTHY, E.LEFT, H.DEAD),
    (H.HEALTHY, E.UPDATED, H.HEALTHY),
    (H.HEALTHY, E.UPDATE_FAILED, H.STALE),
    (H.SUSPECT, E.ANSWERED, H.HEALTHY),
    (H.SUSPECT, E.LATE, H.SUSPECT),
    (H.SUSPECT, E.LOST, H.DEAD),
    (H.SUSPECT, E.LEFT, H.DEAD),
    (H.SUSPECT, E.UPDATED, H.HEALTHY),
    (H.SUSPECT, E.UPDATE_FAILED, H.STALE),
    (H.STALE, E.ANSWERED, H.STALE),
    (H.STALE, E.LATE, H.STALE),
    (H.STALE, E.LOST, H.DEAD),
    (H.STALE, E.LEFT, H.DEAD),
    (H.STALE, E.UPDATED, H.HEALTHY),
    (H.STALE, E.UPDATE_FAILED, H.STALE),
    (H.DEAD, E.RESTART, H.RESTARTING),
    *((H.DEAD, event, H.DEAD) for event in (E.ANSWERED, E.LATE, E.LOST, E.UPDATED, E.UPDATE_FAILED)),
    (H.RESTARTING, E.RESTARTED, H.STALE),
    (H.RESTARTING, E.LOST, H.DEAD),
    *((H.RESTARTING, event, H.RESTARTING) for event in (E.ANSWERED, E.LATE, E.UPDATED, E.UPDATE_FAILED)),
}
FOLLOWING = {(before, event): after for before, event, after in LEGAL}
PATH_TO: dict[Health, Sequence[Event]] = {
    H.HEALTHY: (),
    H.SUSPECT: (E.LATE,),
    H.STALE: (E.UPDATE_FAILED,),
    H.DEAD: (E.LOST,),
    H.RESTARTING: (E.LOST, E.RESTART),
}
POLICY = SupervisionPolicy(
    probe_every_s=2.0, suspect_s=10.0, dead_s=60.0, max_restarts=3, restart_window_s=1000.0, restart_pause_s=1.0
)


def in_state(health: Health) -> Watched:
    watched = Watched(POLICY, now=0.0)
    for event in PATH_TO[health]:
        watched.on(event, 0.0)
    assert watched.health is health
    return watched


# --- states -------------------------------------------------------------------------------------------------------------


def test_the_table_is_what_is_drawn() -> None:
    assert {(before, event, after) for (before, event), after in TRANSITIONS.items()} == LEGAL


@pytest.mark.parametrize(("before", "event"), list(itertools.product(H, E)), ids=lambda value: value.value.replace(" ", "-"))
def test_every_event_in_every_state(before: Health, event: Event) -> None:
    watched = in_state(before)
    if (before, event) in FOLLOWING:
        assert watched.on(event, 1.0) is watched.health is FOLLOWING[before, event]
    else:
        with pytest.raises(ValueError, match=f"is {before.value} cannot have '{event.value}'"):
            watched.on(event, 1.0)
        assert watched.health is before


def test_only_a_healthy_instance_serves() -> None:
    assert [health for health in H if health.serves] == [H.HEALTHY]


def test_a_new_process_serves_only_after_a_completed_update() -> None:
    watched = in_state(H.RESTARTING)
    for event, expected in ((E.RESTARTED, H.STALE), (E.ANSWERED, H.STALE), (E.UPDATE_FAILED, H.STALE), (E.UPDATED, H.HEALTHY)):
        assert watched.on(event, 1.0) is expected


@given(events=st.lists(st.sampled_from(list(E)), max_size=40))
def test_no_way_from_death_to_service_but_a_restart_and_an_update(events: list[Event]) -> None:
    watched = in_state(H.DEAD)
    needed = [E.RESTART, E.RESTARTED, E.UPDATED]
    for event in events:
        if (watched.health, event) not in FOLLOWING:
            continue
        if watched.on(event, 1.0) is H.DEAD:
            needed = [E.RESTART, E.RESTARTED, E.UPDATED]
        elif needed and event is needed[0]:
            needed.pop(0)
        assert not (watched.health.serves and needed)
        if watched.health is H.HEALTHY:
            break


# --- probes -------------------------------------------------------------------------------------------------------------


def test_one_probe_at_a_time_every_so_often() -> None:
    watched = Watched(POLICY, now=100.0)
    assert not watched.should_probe(101.9)
    assert watched.should_probe(102.0)
    watched.asked(102.0)
    assert not watched.should_probe(104.0)
    assert not watched.should_probe(150.0), "the first is still without its answer"
    watched.on(E.ANSWERED, 150.0)
    assert watched.should_probe(150.0)
    watched.asked(150.0)
    watched.on(E.ANSWERED, 150.5)
    assert not watched.should_probe(151.9)
    assert watched.should_probe(152.0)


def test_watched_that_is_busy_is_late_and_lost_only_by_its_own_limit() -> None:
    watched = Watched(msgspec.structs.replace(POLICY, busy_s=300.0), now=0.0)
    watched.asked(2.0)
    for now in range(3, 302, 10):
        watched.busy(float(now))
        assert watched.overdue(float(now)) is (E.LATE if now >= 12 else None)
    assert (watched.overdue(302.0), watched.passed_limit(302.0)) == (E.LOST, "busy_s")


def test_watched_that_is_no_longer_busy_is_lost_by_its_silence_since() -> None:
    watched = Watched(POLICY, now=0.0)
    watched.asked(2.0)
    watched.busy(50.0)
    assert watched.overdue(109.9) is E.LATE
    assert (watched.overdue(110.0), watched.passed_limit(110.0)) == (E.LOST, "dead_s")
    watched.on(E.ANSWERED, 110.0)
    assert watched.passed_limit(1000.0) == ""


@given(gaps=st.lists(st.floats(0.01, 30.0), min_size=1, max_size=60), answers=st.lists(st.booleans(), min_size=60, max_size=60))
def test_at_most_one_probe_is_outstanding_whatever_the_times(gaps: list[float], answers: list[bool]) -> None:
    watched, now, num_outstanding = Watched(POLICY, now=0.0), 0.0, 0
    for gap, answers_now in zip(gaps, answers, strict=False):
        now += gap
        if (event := watched.overdue(now)) is not None:
            watched.on(event, now)
            if event is E.LOST:
                assert watched.health is H.DEAD
                return
        if watched.should_probe(now):
            watched.asked(now)
            num_outstanding += 1
        assert num_outstanding <= 1
        if answers_now and num_outstanding:
            num_outstanding = 0
            assert watched.on(E.ANSWERED, now) is H.HEALTHY


def test_silence_makes_suspect_then_dead_and_an_answer_healthy() -> None:
    watched = Watched(POLICY, now=0.0)
    watched.asked(5.0)
    assert watched.overdue(14.9) is None
    assert watched.overdue(15.0) is E.LATE
    assert watched.on(E.LATE, 15.0) is H.SUSPECT
    assert watched.overdue(64.9) is E.LATE
    assert watched.on(E.ANSWERED, 64.9) is H.HEALTHY
    assert watched.overdue(1000.0) is None, "nothing was asked since"
    watched.asked(70.0)
    assert watched.overdue(130.0) is E.LOST
    assert watched.on(E.LOST, 130.0) is H.DEAD
    assert watched.overdue(1000.0) is None


def test_a_busy_instance_that_answers_is_not_suspected() -> None:
    """A call of an hour says nothing of the instance; only its probes do."""
    watched = Watched(POLICY, now=0.0)
    for now in range(2, 3600, 2):
        assert watched.overdue(float(now)) is None
        assert watched.should_probe(float(now))
        watched.asked(float(now))
        assert watched.on(E.ANSWERED, now + 1.0) is H.HEALTHY


@pytest.mark.parametrize("health", [H.DEAD, H.RESTARTING], ids=lambda health: health.value)
def test_what_is_not_there_is_not_asked_and_not_late(health: Health) -> None:
    watched = Watched(POLICY, now=0.0)
    watched.asked(0.0)
    for event in PATH_TO[health]:
        watched.on(event, 1.0)
    assert not watched.should_probe(1000.0)
    assert watched.overdue(1000.0) is None


@pytest.mark.parametrize("health", [H.STALE, H.SUSPECT], ids=lambda health: health.value)
def test_what_lives_without_serving_is_probed(health: Health) -> None:
    watched = in_state(health)
    assert watched.should_probe(2.0)
    watched.asked(2.0)
    assert watched.overdue(62.0) is E.LOST


def test_a_late_answer_of_a_dead_process_changes_nothing() -> None:
    watched = Watched(POLICY, now=0.0)
    watched.asked(0.0)
    watched.on(E.LOST, 60.0)
    due = watched.restart_at(60.0)
    for event in (E.ANSWERED, E.UPDATED, E.UPDATE_FAILED, E.LATE, E.LOST):
        assert watched.on(event, 60.5) is H.DEAD
    assert watched.restart_at(60.5) == due
    watched.on(E.RESTART, 61.0)
    for event in (E.ANSWERED, E.UPDATED, E.UPDATE_FAILED, E.LATE):
        assert watched.on(event, 62.0) is H.RESTARTING
    assert not watched.should_probe(1000.0)


def test_a_new_process_is_probed_at_once_and_judged_by_its_own_silence() -> None:
    watched = Watched(POLICY, now=0.0)
    watched.asked(0.0)
    watched.on(E.LOST, 60.0)
    watched.on(E.RESTART, 61.0)
    watched.on(E.RESTARTED, 300.0)
    assert watched.overdue(300.0) is None
    assert watched.should_probe(300.0)
    watched.asked(300.0)
    assert watched.overdue(309.0) is None


# --- restarts -----------------------------------------------------------------------------------------------------------


def test_pauses_double_and_the_budget_ends() -> None:
    watched, now = Watched(POLICY, now=0.0), 100.0
    for pause_s in (1.0, 2.0, 4.0):
        watched.on(E.LOST, now)
        assert watched.restart_at(now) == now + pause_s
        now += pause_s
        watched.on(E.RESTART, now)
        now += 5.0
        watched.on(E.RESTARTED, now)
        watched.on(E.UPDATED, now)
    watched.on(E.LOST, now)
    assert watched.restart_at(now) is None


def test_the_budget_is_of_a_window() -> None:
    watched = Watched(POLICY, now=0.0)
    for now in (0.0, 100.0, 200.0):
        watched.on(E.LOST, now)
        watched.on(E.RESTART, now)
    watched.on(E.LOST, 300.0)
    assert watched.restart_at(999.0) is None
    assert watched.restart_at(1000.0) == 300.0 + 4.0, "the first has left the window, two are in it"
    assert watched.restart_at(1100.0) == 300.0 + 2.0
    assert watched.restart_at(5000.0) == 300.0 + 1.0


def test_a_restart_that_fails_counts() -> None:
    watched = in_state(H.RESTARTING)
    assert watched.on(E.LOST, 10.0) is H.DEAD
    assert watched.restart_at(10.0) == 12.0


def test_one_that_was_left_is_built_anew_at_once_and_that_is_not_counted() -> None:
    watched = Watched(POLICY, now=0.0)
    for now in (0.0, 100.0, 200.0, 300.0):
        watched.on(E.LEFT, now)
        assert watched.restart_at(now) == now
        watched.on(E.ANSWERED, now)  # late news
        assert watched.restart_at(now) == now
        watched.on(E.RESTART, now)
        watched.on(E.RESTARTED, now)
        watched.on(E.UPDATED, now)
    watched.on(E.LEFT, 400.0)
    watched.on(E.RESTART, 400.0)
    watched.on(E.LOST, 410.0)
    assert watched.restart_at(410.0) == 411.0, "one that fails is as any other"


@pytest.mark.parametrize("health", [health for health in H if health is not H.DEAD], ids=lambda health: health.value)
def test_only_the_dead_are_built_anew(health: Health) -> None:
    assert in_state(health).restart_at(1e6) is None


def test_without_a_budget_the_dead_stay_dead() -> None:
    watched = Watched(SupervisionPolicy(max_restarts=0), now=0.0)
    watched.on(E.LOST, 0.0)
    assert watched.restart_at(1e6) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probe_every_s": 0.0}, "above 0"),
        ({"probe_every_s": 11.0}, "in this order"),
        ({"dead_s": 10.0}, "in this order"),
        ({"max_restarts": -1}, "max_restarts is -1"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SupervisionPolicy(**options)  # type: ignore[arg-type]
