"""The requests that wait: their order, whatever comes and goes, and that what has gone is not
kept.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helmsman.controller._generation.request import RequestOptions, Ticket, WaitingRequests
from tests.unit.controller.generation.backends import make_request


def make_ticket(priority: int = 0) -> Ticket:
    return Ticket(make_request("r"), RequestOptions(priority=priority))


def in_order(waiting: WaitingRequests) -> list[Ticket]:
    found = []
    while (ticket := waiting.first()) is not None:
        assert waiting.pass_over() is ticket
        if ticket not in found:  # some are in the heap twice
            found.append(ticket)
    waiting.put_back(found)
    return found


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 200), st.integers(-2, 2)), max_size=300)
)
def test_waiting_requests_first(steps: list[tuple[bool, int, int]]) -> None:
    waiting, known, expected = WaitingRequests(), list[Ticket](), set[Ticket]()
    for comes, which, priority in steps:
        if not known or (comes and which % 3):
            known.append(make_ticket(priority))
        ticket = known[-1] if comes and which % 3 else known[which % len(known)]
        if comes:
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


def test_waiting_requests_forget_discarded_ones() -> None:
    waiting, ticket = WaitingRequests(), make_ticket()
    for _ in range(10_000):
        waiting.add(ticket)
        waiting.discard(ticket)
    assert len(waiting._heap) < 100
