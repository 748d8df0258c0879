"""What a rollout controller knows of its instances, and which of them takes the next request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec


class InstanceState(Enum):
    """States of a rollout instance: SERVING <-> STALE, and from both to DEAD.

    A failed weight update makes an instance stale; only a completed one lets it serve again.
    """

    SERVING = "serving"
    """It takes requests."""
    STALE = "stale"
    """Its last weight update failed, so it takes no requests; those that run go on."""
    DEAD = "dead"
    """Its process died."""


@dataclass(slots=True, eq=False)
class Instance:
    """One rollout worker and the work it has been given."""

    worker_id: str
    state: InstanceState = InstanceState.SERVING
    num_in_flight: int = 0
    """Requests sent and not yet answered."""
    outstanding_tokens: int = 0
    """Prompt tokens plus the most new tokens of those requests."""
    error: Exception | None = None
    """Why it does not serve."""

    def begin(self, num_tokens: int) -> None:
        """Count a request that is sent to it."""
        self.num_in_flight += 1
        self.outstanding_tokens += num_tokens

    def end(self, num_tokens: int) -> None:
        """Count a request that it no longer works on."""
        self.num_in_flight -= 1
        self.outstanding_tokens -= num_tokens

    def exclude(self, state: InstanceState, error: Exception) -> None:
        """Take it out of routing; a dead instance stays dead, for the reason it died of."""
        if self.state is not InstanceState.DEAD:
            self.state, self.error = state, error

    def admit(self) -> None:
        """Let it serve after a completed weight update, unless it has died."""
        if self.state is InstanceState.STALE:
            self.state, self.error = InstanceState.SERVING, None


def least_loaded(instances: Sequence[Instance], max_in_flight: int) -> Instance | None:
    """The serving instance with the fewest outstanding tokens among those below ``max_in_flight``; the first one of equals."""
    able = [i for i in instances if i.state is InstanceState.SERVING and i.num_in_flight < max_in_flight]
    return min(able, key=lambda instance: instance.outstanding_tokens, default=None)


class InstanceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance does at the moment of asking."""

    state: InstanceState
    num_in_flight: int
    outstanding_tokens: int


class RolloutLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout controller does at the moment of asking."""

    num_queued: int
    """Requests that no instance has been given yet."""
    paused: bool
    instances: dict[str, InstanceLoad]
    """By worker id."""
