"""Tests of WaitingRequests: order, removal and put_back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helmsman.controller._rollout.request import Ticket, WaitingRequests
from tests.unit.controller.rollout.backends import make_ticket


def in_order(waiting: WaitingRequests) -> list[Ticket]:
    found = []
    while (ticket := waiting.first()) is not None:
        assert waiting.pass_over() is ticket
        if ticket not in found:  # the heap may hold a ticket twice
            found.append(ticket)
    waiting.put_back(found)
    return found


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 200), st.integers(-2, 2)), max_size=100)
)
def test_waiting_requests_first(steps: list[tuple[bool, int, int]]) -> None:
    waiting, known, expected = WaitingRequests(), list[Ticket](), set[Ticket]()
    for is_added, choice, priority in steps:
        if not known or (is_added and choice % 3):
            known.append(make_ticket(priority=priority))
        ticket = known[-1] if is_added and choice % 3 else known[choice % len(known)]
        if is_added:
            if ticket not in waiting:
                waiting.add(ticket)
            expected.add(ticket)
        else:
            waiting.discard(ticket)
            expected.discard(ticket)
        assert set(waiting) == expected
        assert len(waiting) == len(expected)
        assert waiting.first() is min(expected, key=lambda each: each.order, default=None)
    assert in_order(waiting) == sorted(expected, key=lambda each: each.order) == in_order(waiting)


def test_waiting_requests_pass_over_and_put_back() -> None:
    waiting = WaitingRequests()
    first, second, third = make_ticket(), make_ticket(), make_ticket()
    for ticket in (third, first, second):
        waiting.add(ticket)
    passed = [waiting.pass_over(), waiting.pass_over()]
    assert passed == [first, second]
    assert (first in waiting, waiting.first()) == (True, third)
    waiting.discard(first)
    waiting.put_back(passed)
    assert in_order(waiting) == [second, third]
