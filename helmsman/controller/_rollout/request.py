"""Generation requests, their queue, and the rollout instances that serve them."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import msgspec

from helmsman.api.generation import GenerationRequest, GenerationResult, StopReason
from helmsman.api.suggestions import Suggesting
from helmsman.controller._rollout.health import Health


class RequestState(Enum):
    """States of a request; it reaches exactly one of the last four, exactly once.

              .---------- its instance was lost, or returned it ----------.
              v                                                           |
    QUEUED -> ADMITTED -> RUNNING ----------------------------------------'
      |  ^________|          |
      |                      +--> DONE      generation completed
      +----------------------+--> PARTIAL   aborted, with tokens of any attempt
      +----------------------+--> ABORTED   aborted, without tokens
      +----------------------+--> FAILED    an error, or its deadline passed
    """

    QUEUED = "queued"
    """It is assigned to no instance."""
    ADMITTED = "admitted"
    """An instance has reserved a place for it; nothing has been sent."""
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
    """Scheduling options of a request."""

    priority: int = 0
    """Higher goes first; ties go in the order of submission."""
    deadline_s: float | None = None
    """Seconds from submission until the request must have ended; None for no deadline."""
    expected_tokens: int | None = None
    """Estimate of its new tokens, for routing; ``max_new_tokens`` when None."""
    session: str = ""
    """SessionAffinity sends the requests of one session to one instance; '' for no session."""


_numbers = itertools.count()


class Ticket:
    """A request from its submission to its end.

    Use it on one event loop; its future may be used from any thread.
    """

    def __init__(self, request: GenerationRequest, options: RequestOptions) -> None:
        self.request, self.options = request, options
        self.future: Future[GenerationResult] = Future()
        """PENDING until it is first sent, and cancellable; RUNNING after that, when only abort ends
        it early.
        """
        self.state = RequestState.QUEUED
        self.number = next(_numbers)
        self.since = time.monotonic()
        self.instance: Instance | None = None
        self.sent_to = ""
        """Id of the instance it was last sent to."""
        self.num_attempts = 0
        self.num_losses = 0
        """Number of attempts that ended with the loss of their instance."""
        self.is_aborted = False
        """Whether an abort was requested."""
        self.is_recalled = False
        """Whether its instance must return it, to be continued elsewhere."""
        self.together: Sequence[Ticket] = ()
        """Samples of the same prompt, this one included, that are sent in one call; empty if it is
        sent alone.
        """
        self._pieces: list[GenerationResult] = []

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_running(self) -> bool:
        """Whether it was sent and has not ended."""
        return self.state is RequestState.RUNNING

    @property
    def order(self) -> tuple[int, int]:
        """Sort key in the queue; the smallest goes first."""
        return -self.options.priority, self.number

    @property
    def num_tokens(self) -> int:
        """Its load for routing: prompt tokens plus expected new tokens."""
        expected = self.options.expected_tokens
        return len(self.request.prompt_ids) + (
            self.request.sampling.max_new_tokens if expected is None else expected
        )

    def transition(self, state: RequestState) -> None:
        """Move to the next state, which must be legal."""
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state

    def keep(self, piece: GenerationResult) -> None:
        """Keep the tokens of an attempt; the next attempt continues from them."""
        if piece.token_ids:
            self._pieces.append(piece)

    @property
    def num_kept(self) -> int:
        """Number of tokens from earlier attempts."""
        return sum(len(piece.token_ids) for piece in self._pieces)

    @property
    def newest_version(self) -> int | None:
        """Weight version of the last token from earlier attempts; None without tokens."""
        return self._pieces[-1].versions[-1] if self._pieces else None

    @property
    def kept_end(self) -> StopReason | None:
        """Stop reason if the tokens from earlier attempts are complete; None if more may follow."""
        if self._pieces and self._pieces[-1].token_ids[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_kept >= self.request.sampling.max_new_tokens else None

    def to_send(self) -> GenerationRequest:
        """Return the request for the next attempt.

        It continues the prompt and all tokens so far, within the remaining token limit.
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
        """Merge the tokens of earlier attempts and ``last`` into one result.

        Each token keeps its log-probability and the weight version that generated it.
        ``stop_reason`` defaults to that of ``last``, or "abort".
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
    """A rollout instance, as the request scheduler sees it."""

    instance_id: str
    capacity: int
    """Maximum number of requests in flight at it."""
    health: Health = Health.HEALTHY
    error: Exception | None = None
    version: int | None = None
    """Upper bound on its weight version; None while unknown."""
    drains: set[object] = field(default_factory=set)
    """Markers of the drains in force; while there are any, it receives no new requests."""
    outstanding_tokens: int = 0
    last_turn: int = 0
    """Global sequence number of the last request it received; smaller is longer ago."""
    tickets: dict[Ticket, None] = field(default_factory=dict)
    """Its requests, admitted or running, in the order of arrival. A set's order would differ
    between runs, and make runs on a virtual clock irreproducible.
    """

    @property
    def num_in_flight(self) -> int:
        return len(self.tickets)

    @property
    def is_draining(self) -> bool:
        """Whether it receives no new requests, regardless of its health."""
        return bool(self.drains)

    @property
    def is_serving(self) -> bool:
        return self.health.is_serving and not self.is_draining

    def has_room_for(self, num: int) -> bool:
        """Return whether it serves and has room for ``num`` requests, capped at its capacity."""
        # The length check comes first since it is cheap and usually fails under load; this runs
        # for every instance whenever a request may be assigned.
        return len(self.tickets) + min(num, self.capacity) <= self.capacity and self.is_serving

    def take(self, ticket: Ticket) -> None:
        self.tickets[ticket] = None
        self.outstanding_tokens += ticket.num_tokens
        self.last_turn = next(_turns)

    def give_back(self, ticket: Ticket) -> None:
        """Remove a request from the count; ignored if the instance does not have it."""
        if ticket in self.tickets:
            del self.tickets[ticket]
            self.outstanding_tokens -= ticket.num_tokens


class InstanceStats(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of one instance."""

    state: Health
    num_in_flight: int
    outstanding_tokens: int
    is_draining: bool = False
    """Whether it receives no new requests, regardless of its state."""
    is_asleep: bool = False
    """Whether it sleeps while other instances serve."""


class RolloutStats(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of a rollout controller."""

    num_queued: int
    """Number of requests that are assigned to no instance."""
    paused: bool
    instances: dict[str, InstanceStats]


_SPARE_ENTRIES = 64


class WaitingRequests:
    """Priority queue of tickets; removal from any position needs no search.

    Removed tickets stay in the heap until they reach its top or _tidy rebuilds it.
    """

    def __init__(self) -> None:
        self._tickets: dict[Ticket, None] = {}
        self._heap: list[tuple[tuple[int, int], Ticket]] = []
        """Entries of all tickets, some duplicated, and of removed ones; _tidy bounds its size."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate in the order in which they were queued."""
        return iter(self._tickets)

    def add(self, ticket: Ticket) -> None:
        self._tickets[ticket] = None
        heapq.heappush(self._heap, (ticket.order, ticket))
        self._tidy()

    def discard(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket, None)
        self._tidy()

    def first(self) -> Ticket | None:
        """Return the first ticket that is not passed over; None if there is none."""
        while self._heap:
            if (ticket := self._heap[0][1]) in self._tickets:
                return ticket
            heapq.heappop(self._heap)
        return None

    def pass_over(self) -> Ticket:
        """Skip the first ticket until put_back, and return it; it stays queued.

        There must be a first ticket. A rebuild of the heap may end the skip earlier.
        """
        return heapq.heappop(self._heap)[1]

    def put_back(self, tickets: Iterable[Ticket]) -> None:
        """End the skip of these tickets; ignore those that are no longer queued."""
        for ticket in tickets:
            if ticket in self._tickets:
                heapq.heappush(self._heap, (ticket.order, ticket))

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._tickets) + _SPARE_ENTRIES:
            self._heap = [(ticket.order, ticket) for ticket in self._tickets]
            heapq.heapify(self._heap)
