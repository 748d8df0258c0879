"""What is known of a rollout instance: its health, its place in routing, and the work it has been given."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec

from helmsman.controller._generation.health import Health
from helmsman.controller._generation.request import Ticket

_turns = itertools.count(1)


@dataclass(slots=True, eq=False)
class Instance:
    """One rollout instance."""

    instance_id: str
    capacity: int
    """Requests that it is given at once, at most."""
    health: Health = Health.HEALTHY
    error: Exception | None = None
    """Why it does not serve."""
    version: int | None = None
    """Its weights are not newer than this; None while that is not known."""
    drains: set[object] = field(default_factory=set)
    """Marks of those who want it to get nothing more."""
    outstanding_tokens: int = 0
    """Of the requests that it has."""
    last_turn: int = 0
    """Grows with each request that any instance is given: where it is smaller, the last one was given longer ago."""
    tickets: dict[Ticket, None] = field(default_factory=dict)
    """Requests that it has, admitted or running, in the order in which it was given them: a set's order would differ from one
    run to the next, and with it what follows on a virtual clock."""

    @property
    def num_in_flight(self) -> int:
        """How many requests it has."""
        return len(self.tickets)

    @property
    def is_draining(self) -> bool:
        """Whether it gets nothing more, whatever its health."""
        return bool(self.drains)

    @property
    def serves(self) -> bool:
        """Whether it may be given requests."""
        return self.health.serves and not self.is_draining

    def has_room_for(self, num: int) -> bool:
        """Whether it serves, and may be given so many more, or as many as it ever may be."""
        # The full ones first: under load they are most of them, and each is asked whenever a request may be given out.
        return len(self.tickets) + min(num, self.capacity) <= self.capacity and self.serves

    def take(self, ticket: Ticket) -> None:
        """Count a request that it is given."""
        self.tickets[ticket] = None
        self.outstanding_tokens += ticket.num_tokens
        self.last_turn = next(_turns)

    def give_back(self, ticket: Ticket) -> None:
        """Count a request that it no longer has; nothing when it had none such."""
        if ticket in self.tickets:
            del self.tickets[ticket]
            self.outstanding_tokens -= ticket.num_tokens


class InstanceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance does at the moment of asking."""

    state: Health
    num_in_flight: int
    outstanding_tokens: int
    is_draining: bool = False
    """Whether it gets nothing more, whatever its state."""


class RolloutLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout controller does at the moment of asking."""

    num_queued: int
    """Requests that no instance has been given yet."""
    paused: bool
    instances: dict[str, InstanceLoad]
    """By worker id."""
