"""The requests that wait, in the order in which they go: by priority, then by age."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from helmsman.controller._generation.request import Ticket

_SPARE_ENTRIES = 64


class WaitingRequests:
    """A set of tickets that knows its first one. What leaves it costs no search, wherever it stands."""

    def __init__(self) -> None:
        self._tickets: dict[Ticket, None] = {}
        self._heap: list[tuple[tuple[int, int], Ticket]] = []
        """Of all tickets, some of them twice, and of some that no longer wait: not more than about as many."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def __iter__(self) -> Iterator[Ticket]:
        """In the order in which they came to wait."""
        return iter(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Have it wait at the place that its order gives it."""
        self._tickets[ticket] = None
        heapq.heappush(self._heap, (ticket.order, ticket))
        self._tidy()

    def discard(self, ticket: Ticket) -> None:
        """Have it wait no more, if it does."""
        self._tickets.pop(ticket, None)
        self._tidy()

    def first(self) -> Ticket | None:
        """The first, of those that are not passed over."""
        while self._heap:
            if (ticket := self._heap[0][1]) in self._tickets:
                return ticket
            heapq.heappop(self._heap)
        return None

    def pass_over(self) -> Ticket:
        """Leave out the first one, of which there must be one, until put_back at most; it goes on waiting. Returns it."""
        return heapq.heappop(self._heap)[1]

    def put_back(self, tickets: Iterable[Ticket]) -> None:
        """Pass these over no more, as far as they still wait."""
        for ticket in tickets:
            if ticket in self._tickets:
                heapq.heappush(self._heap, (ticket.order, ticket))

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._tickets) + _SPARE_ENTRIES:
            self._heap = [(ticket.order, ticket) for ticket in self._tickets]
            heapq.heapify(self._heap)
