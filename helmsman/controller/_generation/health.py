"""The health of an instance as a pure state machine, and the policy of its supervision."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from helmsman.api.supervision import ProbePolicy


class Health(Enum):
    """States of an instance.

    HEALTHY <--> SUSPECT                     probes that are late, and one that is answered
       |  ^         |
       |  |         v
       |  |       DEAD --> RESTARTING --> STALE   a new process, with the weights it was built with
       |  |         ^          |            |
       |  |         +----------+------------+
       |  '------ a completed weight update |
       '--> STALE <------------------------->
            (a failed weight update)
    """

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It has not answered for a while: it gets nothing new, and keeps what it has."""
    DEAD = "dead"
    """Its process has ended, or those of its engine, or it has not answered for too long."""
    RESTARTING = "restarting"
    STALE = "stale"
    """It lives, and has not the weights that are served: only a completed update lets it serve."""

    @property
    def is_serving(self) -> bool:
        """Whether it may be given requests."""
        return self is Health.HEALTHY

    @property
    def is_alive(self) -> bool:
        """Whether it is there, as far as is known."""
        return self not in (Health.DEAD, Health.RESTARTING)


class Event(Enum):
    ANSWERED = "answered"
    LATE = "late"
    """A probe has been without an answer for ``suspect_s``."""
    LOST = "lost"
    """Its process has ended, or those of its engine, or a probe has been without an answer for
    ``dead_s``.
    """
    EVACUATED = "evacuated"
    """It is about to go, as its node is, and has nothing any more: it is given up, to be rebuilt
    elsewhere.
    """
    RESTART = "restart"
    RESTARTED = "restarted"
    UPDATED = "updated"
    UPDATE_FAILED = "update failed"


_H, _E = Health, Event
_ALIVE = {
    _E.LOST: _H.DEAD,
    _E.EVACUATED: _H.DEAD,
    _E.UPDATED: _H.HEALTHY,
    _E.UPDATE_FAILED: _H.STALE,
}
_LATE_NEWS = (_E.ANSWERED, _E.LATE, _E.UPDATED, _E.UPDATE_FAILED)
"""Of a process that has ended; they change nothing."""
TRANSITIONS: Mapping[Health, Mapping[Event, Health]] = MappingProxyType(
    {
        _H.HEALTHY: {**_ALIVE, _E.ANSWERED: _H.HEALTHY, _E.LATE: _H.SUSPECT},
        _H.SUSPECT: {**_ALIVE, _E.ANSWERED: _H.HEALTHY, _E.LATE: _H.SUSPECT},
        _H.STALE: {**_ALIVE, _E.ANSWERED: _H.STALE, _E.LATE: _H.STALE},
        _H.DEAD: {**dict.fromkeys((*_LATE_NEWS, _E.LOST), _H.DEAD), _E.RESTART: _H.RESTARTING},
        _H.RESTARTING: {
            **dict.fromkeys(_LATE_NEWS, _H.RESTARTING),
            _E.LOST: _H.DEAD,
            _E.RESTARTED: _H.STALE,
        },
    }
)
"""State -> event -> following state; an event that is missing cannot happen in the state."""


def follow(health: Health, event: Event) -> Health:
    """The state that follows. Raises: ValueError for an event that cannot happen now."""
    if (following := TRANSITIONS[health].get(event)) is None:
        raise ValueError(f"an instance that is {health.value} cannot have {event.value!r}")
    return following


class SupervisionPolicy(ProbePolicy, frozen=True, kw_only=True):
    """When an instance is suspected, given up and rebuilt. Times in seconds."""

    suspect_s: float = 10.0
    """A probe that is not answered for so long makes it suspect: it gets nothing new, and keeps
    what it has.
    """
    max_restarts: int = 3
    """Within ``restart_window_s``; beyond them it stays dead until the window has room. The first
    one after it was left in time is not counted."""
    restart_window_s: float = 3600.0
    restart_pause_s: float = 1.0
    """Before the first restart; doubled with each more within the window."""

    def __post_init__(self) -> None:
        if not 0 < self.probe_every_s <= self.suspect_s < self.dead_s:
            raise ValueError(
                f"probe_every_s {self.probe_every_s:g}, suspect_s {self.suspect_s:g} and dead_s "
                f"{self.dead_s:g} must be in "
                "this order, and above 0"
            )
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts}; expected 0 or more")
