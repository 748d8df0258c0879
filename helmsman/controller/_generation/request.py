"""Generation requests, those that wait, and the rollout instances that are given them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import msgspec

from helmsman.api.generation import GenerationRequest, GenerationResult, StopReason
from helmsman.api.suggestions import Suggesting
from helmsman.controller._generation.health import Health


class RequestState(Enum):
    """States of a request; it reaches exactly one of the last four, exactly once.

              .---------- the instance was lost, or gave it back ---------.
              v                                                           |
    QUEUED -> ADMITTED -> RUNNING ----------------------------------------'
      |  ^________|          |
      |                      +--> DONE      it came to its end
      +----------------------+--> PARTIAL   aborted, with the tokens it had, of any attempt
      +----------------------+--> ABORTED   aborted, without any
      +----------------------+--> FAILED    an error, or its deadline
    """

    QUEUED = "queued"
    """No instance has it."""
    ADMITTED = "admitted"
    """An instance keeps a place for it; nothing has been sent."""
    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_end(self) -> bool:
        return not TRANSITIONS[self]


_STATE = RequestState
_EARLY = frozenset({_STATE.PARTIAL, _STATE.ABORTED, _STATE.FAILED})
TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = MappingProxyType(
    {
        _STATE.QUEUED: _EARLY | {_STATE.ADMITTED},
        _STATE.ADMITTED: _EARLY | {_STATE.RUNNING, _STATE.QUEUED},
        _STATE.RUNNING: _EARLY | {_STATE.QUEUED, _STATE.DONE},
        **dict.fromkeys((_STATE.DONE, *_EARLY), frozenset()),
    }
)


class RequestOptions(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """How a request is treated."""

    priority: int = 0
    """Higher goes first; equals go in the order of their submission."""
    deadline_s: float | None = None
    """Seconds from submission to its end; none when None."""
    expected_tokens: int | None = None
    """New tokens that it will likely have, for routing; its ``max_new_tokens`` when None."""
    session: str = ""
    """Requests of one session go to one instance while that is not overloaded; '' for none."""


_numbers = itertools.count()


class Ticket:
    """A request between its submission and its end. Used on one event loop; its future from any
    thread.
    """

    def __init__(self, request: GenerationRequest, options: RequestOptions) -> None:
        self.request, self.options = request, options
        self.future: Future[GenerationResult] = Future()
        """PENDING while queued, when it can be cancelled; RUNNING once it was sent, when only abort
        ends it early.
        """
        self.state = RequestState.QUEUED
        self.number = next(_numbers)
        self.instance: Instance | None = None
        self.sent_to = ""
        """Id of the instance that it was last sent to."""
        self.num_attempts = 0
        self.num_losses = 0
        """How many of the attempts ended with the loss of their instance."""
        self.is_aborted = False
        """Whether somebody asked for its early end."""
        self.is_recalled = False
        """Whether its instance was asked to give it back, to be continued elsewhere."""
        self.together: Sequence[Ticket] = ()
        """Samples of the same prompt, this one included, which an instance is given by one call;
        none where it goes alone.
        """
        self._pieces: list[GenerationResult] = []

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_running(self) -> bool:
        """Whether it was sent, and has not ended."""
        return self.state is RequestState.RUNNING

    @property
    def order(self) -> tuple[int, int]:
        """Its place among those that wait: the smallest goes first."""
        return -self.options.priority, self.number

    @property
    def num_tokens(self) -> int:
        """What it weighs: tokens that it holds, and those that are likely to come."""
        expected = self.options.expected_tokens
        return len(self.request.prompt_ids) + (
            self.request.sampling.max_new_tokens if expected is None else expected
        )

    def transition(self, state: RequestState) -> None:
        """Go on to the next state. Raises: AssertionError for one that cannot follow, which would
        be a defect of ours.
        """
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state

    def keep(self, piece: GenerationResult) -> None:
        """Keep the tokens of an attempt, which the next one goes on from."""
        if piece.token_ids:
            self._pieces.append(piece)

    @property
    def num_kept(self) -> int:
        """Tokens of earlier attempts."""
        return sum(len(piece.token_ids) for piece in self._pieces)

    @property
    def newest_version(self) -> int | None:
        """Weight version of the last token of earlier attempts; None without any."""
        return self._pieces[-1].versions[-1] if self._pieces else None

    @property
    def kept_end(self) -> StopReason | None:
        """Why nothing follows the tokens of earlier attempts; None where more may."""
        if self._pieces and self._pieces[-1].token_ids[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_kept >= self.request.sampling.max_new_tokens else None

    def to_send(self) -> GenerationRequest:
        """What the next attempt is asked: to continue the prompt and all tokens so far, up to what
        is left of the limit.
        """
        if not self._pieces:
            return self.request
        tokens = [token for piece in self._pieces for token in piece.token_ids]
        sampling = msgspec.structs.replace(
            self.request.sampling, max_new_tokens=self.request.sampling.max_new_tokens - len(tokens)
        )
        return msgspec.structs.replace(
            self.request,
            prompt_ids=[*self.request.prompt_ids, *tokens],
            sampling=sampling,
            num_generated=self.request.num_generated + len(tokens),
        )

    def merged(
        self, last: GenerationResult | None, stop_reason: StopReason | None = None
    ) -> GenerationResult:
        """The tokens of all attempts as one result, each with its log-probability and the version
        that made it.
        """
        pieces = [*self._pieces, *([last] if last is not None else [])]
        return GenerationResult(
            request_id=self.request_id,
            token_ids=[token for piece in pieces for token in piece.token_ids],
            logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
            versions=[version for piece in pieces for version in piece.versions],
            stop_reason=stop_reason or (last.stop_reason if last is not None else "abort"),
        )


_turns = itertools.count(1)


@dataclass(slots=True, eq=False)
class Instance:
    instance_id: str
    capacity: int
    """Requests that it is given at once, at most."""
    health: Health = Health.HEALTHY
    error: Exception | None = None
    version: int | None = None
    """Its weights are not newer than this; None while that is not known."""
    drains: set[object] = field(default_factory=set)
    """Marks of those who want it to get nothing more."""
    outstanding_tokens: int = 0
    last_turn: int = 0
    """Grows with each request that any instance is given: where it is smaller, the last one was
    given longer ago.
    """
    tickets: dict[Ticket, None] = field(default_factory=dict)
    """Requests that it has, admitted or running, in the order in which it was given them: a set's
    order would differ from one run to the next, and with it what follows on a virtual clock."""

    @property
    def num_in_flight(self) -> int:
        return len(self.tickets)

    @property
    def is_draining(self) -> bool:
        """Whether it gets nothing more, whatever its health."""
        return bool(self.drains)

    @property
    def is_serving(self) -> bool:
        return self.health.is_serving and not self.is_draining

    def has_room_for(self, num: int) -> bool:
        """Whether it serves, and may be given so many more, or as many as it ever may be."""
        # The full ones first: under load they are most of them, and each is asked whenever a
        # request may be given out.
        return len(self.tickets) + min(num, self.capacity) <= self.capacity and self.is_serving

    def take(self, ticket: Ticket) -> None:
        self.tickets[ticket] = None
        self.outstanding_tokens += ticket.num_tokens
        self.last_turn = next(_turns)

    def give_back(self, ticket: Ticket) -> None:
        """Count a request that it no longer has; nothing when it had none such."""
        if ticket in self.tickets:
            del self.tickets[ticket]
            self.outstanding_tokens -= ticket.num_tokens


class InstanceStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance does at the moment of asking."""

    state: Health
    num_in_flight: int
    outstanding_tokens: int
    is_draining: bool = False
    """Whether it gets nothing more, whatever its state."""


class RolloutStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout controller does at the moment of asking."""

    num_queued: int
    """Requests that no instance has been given yet."""
    paused: bool
    instances: dict[str, InstanceStats]


_SPARE_ENTRIES = 64


class WaitingRequests:
    """A set of tickets that knows its first one. What leaves it costs no search, wherever it
    stands.
    """

    def __init__(self) -> None:
        self._tickets: dict[Ticket, None] = {}
        self._heap: list[tuple[tuple[int, int], Ticket]] = []
        """Of all tickets, some of them twice, and of some that no longer wait: not more than about
        as many.
        """

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def __iter__(self) -> Iterator[Ticket]:
        """In the order in which they came to wait."""
        return iter(self._tickets)

    def add(self, ticket: Ticket) -> None:
        self._tickets[ticket] = None
        heapq.heappush(self._heap, (ticket.order, ticket))
        self._tidy()

    def discard(self, ticket: Ticket) -> None:
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
        """Leave out the first one, of which there must be one, until put_back at most; it goes on
        waiting. Returns it.
        """
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
