"""The health of an instance as a pure state machine: events and the time go in, states come out; it waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

import msgspec

from helmsman.api.suggestions import Suggesting


class Health(Enum):
    """States of an instance.

    HEALTHY <--> SUSPECT                     probes that are late, and one that is answered
       |  ^         |
       |  |         v
       |  |       DEAD --> RESTARTING --> STALE      a new process, with the weights it was built with
       |  |         ^          |            |
       |  |         +----------+------------+
       |  '------ a completed weight update |
       '--> STALE <------------------------->
            (a failed weight update)
    """

    HEALTHY = "healthy"
    """It serves."""
    SUSPECT = "suspect"
    """It has not answered for a while: it gets nothing new, and keeps what it has."""
    DEAD = "dead"
    """Its process has ended, or those of its engine, or it has not answered for too long."""
    RESTARTING = "restarting"
    """It is being built anew."""
    STALE = "stale"
    """It lives, and has not the weights that are served: only a completed update lets it serve."""

    @property
    def serves(self) -> bool:
        """Whether it may be given requests."""
        return self is Health.HEALTHY

    @property
    def lives(self) -> bool:
        """Whether it is there, as far as is known."""
        return self not in (Health.DEAD, Health.RESTARTING)


class Event(Enum):
    """What can happen to an instance."""

    ANSWERED = "answered"
    """A probe was answered. Not for a call that returned: there would be a second probe before the first is answered."""
    LATE = "late"
    """A probe has been without an answer for ``suspect_s``."""
    LOST = "lost"
    """Its process has ended, or those of its engine, or a probe has been without an answer for ``dead_s``."""
    LEFT = "left"
    """It is about to go, as its node is, and has nothing any more: it is given up, to be built anew elsewhere."""
    RESTART = "restart"
    """It is to be built anew."""
    RESTARTED = "restarted"
    UPDATED = "updated"
    """A weight update has been completed."""
    UPDATE_FAILED = "update failed"


_H, _E = Health, Event
TRANSITIONS: Mapping[tuple[Health, Event], Health] = MappingProxyType(
    {
        (_H.HEALTHY, _E.ANSWERED): _H.HEALTHY,
        (_H.HEALTHY, _E.LATE): _H.SUSPECT,
        (_H.HEALTHY, _E.LOST): _H.DEAD,
        (_H.HEALTHY, _E.LEFT): _H.DEAD,
        (_H.HEALTHY, _E.UPDATED): _H.HEALTHY,
        (_H.HEALTHY, _E.UPDATE_FAILED): _H.STALE,
        (_H.SUSPECT, _E.ANSWERED): _H.HEALTHY,
        (_H.SUSPECT, _E.LATE): _H.SUSPECT,
        (_H.SUSPECT, _E.LOST): _H.DEAD,
        (_H.SUSPECT, _E.LEFT): _H.DEAD,
        (_H.SUSPECT, _E.UPDATED): _H.HEALTHY,
        (_H.SUSPECT, _E.UPDATE_FAILED): _H.STALE,
        (_H.STALE, _E.ANSWERED): _H.STALE,
        (_H.STALE, _E.LATE): _H.STALE,
        (_H.STALE, _E.LOST): _H.DEAD,
        (_H.STALE, _E.LEFT): _H.DEAD,
        (_H.STALE, _E.UPDATED): _H.HEALTHY,
        (_H.STALE, _E.UPDATE_FAILED): _H.STALE,
        (_H.DEAD, _E.ANSWERED): _H.DEAD,
        (_H.DEAD, _E.LATE): _H.DEAD,
        (_H.DEAD, _E.LOST): _H.DEAD,
        (_H.DEAD, _E.RESTART): _H.RESTARTING,
        (_H.DEAD, _E.UPDATED): _H.DEAD,
        (_H.DEAD, _E.UPDATE_FAILED): _H.DEAD,
        (_H.RESTARTING, _E.ANSWERED): _H.RESTARTING,
        (_H.RESTARTING, _E.LATE): _H.RESTARTING,
        (_H.RESTARTING, _E.LOST): _H.DEAD,
        (_H.RESTARTING, _E.RESTARTED): _H.STALE,
        (_H.RESTARTING, _E.UPDATED): _H.RESTARTING,
        (_H.RESTARTING, _E.UPDATE_FAILED): _H.RESTARTING,
    }
)
"""What follows; an event that is not here for a state cannot happen in it. Late news of what has gone change nothing."""


class SupervisionPolicy(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """When an instance is suspected, given up and built anew. Times in seconds."""

    probe_every_s: float = 2.0
    suspect_s: float = 10.0
    """A probe that is not answered for so long makes it suspect. Probes are answered beside a running call, so a busy instance
    is not suspected."""
    dead_s: float = 60.0
    """An instance that has not answered for so long is dead, unless it is busy."""
    busy_s: float = 1800.0
    """An instance that answers no probe but is seen to compute, since C code holds its interpreter's lock, is suspect and
    keeps its requests. It is dead after so long without an answer; ``dead_s`` where that is longer."""
    max_restarts: int = 3
    """Within ``restart_window_s``; beyond them it stays dead. The first one after it was left in time is not counted."""
    restart_window_s: float = 3600.0
    restart_pause_s: float = 1.0
    """Before the first restart; doubled with each more within the window."""

    def __post_init__(self) -> None:
        if not 0 < self.probe_every_s <= self.suspect_s < self.dead_s:
            raise ValueError(
                f"probe_every_s {self.probe_every_s:g}, suspect_s {self.suspect_s:g} and dead_s {self.dead_s:g} must be in "
                "this order, and above 0"
            )
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts}; expected 0 or more")


class Watched:
    """One instance under supervision. The time is given with every event, in seconds on any clock that does not go back."""

    def __init__(self, policy: SupervisionPolicy, now: float, health: Health = Health.HEALTHY) -> None:
        self.policy, self.health = policy, health
        self._asked_at: float | None = None
        self._busy_at = now
        self._last_probe = now
        self._restarts: list[float] = []
        self._dead_since = now
        self._was_left = False

    def on(self, event: Event, now: float) -> Health:
        """Take an event in; returns the state that follows. Raises: ValueError for one that cannot happen now."""
        following = TRANSITIONS.get((self.health, event))
        if following is None:
            raise ValueError(f"an instance that is {self.health.value} cannot have {event.value!r}")
        if event in (Event.ANSWERED, Event.RESTARTED, Event.LOST):
            self._asked_at = None
        if following is Health.DEAD and self.health is not Health.DEAD:
            self._dead_since = now
        if event is Event.RESTART and not self._was_left:
            self._restarts = [*self._recent(now), now]
        self._was_left = event is Event.LEFT or (self._was_left and following is Health.DEAD)
        self.health = following
        return following

    # --- probes -----------------------------------------------------------------------------------------------------------

    def should_probe(self, now: float) -> bool:
        """Whether to ask it now; there is at most one question at a time."""
        if not self.health.lives or self._asked_at is not None:
            return False
        return now - self._last_probe >= self.policy.probe_every_s

    def asked(self, now: float) -> None:
        """A probe was sent."""
        self._asked_at = self._last_probe = now

    def busy(self, now: float) -> None:
        """The instance has not answered the probe, and was seen to compute."""
        self._busy_at = now

    def overdue(self, now: float) -> Event | None:
        """What the silence since the last probe means."""
        if self._asked_at is None or not self.health.lives:
            return None
        if self.passed_limit(now):
            return Event.LOST
        return Event.LATE if now - self._asked_at >= self.policy.suspect_s else None

    def passed_limit(self, now: float) -> str:
        """Name of the limit of the policy that the silence since the last probe has passed; '' for none."""
        if self._asked_at is None:
            return ""
        if now - self._asked_at >= max(self.policy.busy_s, self.policy.dead_s):
            return "busy_s"
        return "dead_s" if now - max(self._asked_at, self._busy_at) >= self.policy.dead_s else ""

    # --- restarts ---------------------------------------------------------------------------------------------------------

    def _recent(self, now: float) -> list[float]:
        return [at for at in self._restarts if now - at < self.policy.restart_window_s]

    def restart_at(self, now: float) -> float | None:
        """When to build a dead instance anew; None when it is not dead, or its budget is spent."""
        if self._was_left:
            return self._dead_since
        num_recent = len(self._recent(now))
        if self.health is not Health.DEAD or num_recent >= self.policy.max_restarts:
            return None
        return float(self._dead_since + self.policy.restart_pause_s * 2**num_recent)
