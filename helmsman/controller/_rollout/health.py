"""State machine of an instance's health, and the supervision policy."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from helmsman.api.supervision import ProbePolicy


class Health(Enum):
    """States of an instance.

    HEALTHY --> SUSPECT                a probe is late
    SUSPECT --> HEALTHY                a probe is answered
    HEALTHY, SUSPECT --> STALE         a weight update fails
    SUSPECT, STALE --> HEALTHY         a weight update completes
    HEALTHY, SUSPECT, STALE --> DEAD   the instance is lost, or drained because its node leaves
    DEAD --> RESTARTING --> STALE      a new process starts, with its initial weights
    RESTARTING --> DEAD                the new process is lost
    """

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """A probe is late: the instance keeps its requests and receives no new ones."""
    DEAD = "dead"
    """Its process or its engine's processes have exited, or it has not answered for too long."""
    RESTARTING = "restarting"
    STALE = "stale"
    """Alive without the served weights; serves only after a completed weight update."""

    @property
    def is_serving(self) -> bool:
        """Whether the instance may receive requests."""
        return self is Health.HEALTHY

    @property
    def is_alive(self) -> bool:
        """Whether the instance is running, as far as is known."""
        return self not in (Health.DEAD, Health.RESTARTING)


class HealthEvent(Enum):
    """Events that change the health of an instance."""

    ANSWERED = "answered"
    LATE = "late"
    """A probe has had no answer for ``suspect_s``."""
    LOST = "lost"
    """Its process or its engine's processes have exited, or a probe has had no answer for
    ``dead_s``.
    """
    EVACUATED = "evacuated"
    """It was drained because its node is about to leave; it is rebuilt elsewhere."""
    RESTART = "restart"
    RESTARTED = "restarted"
    UPDATED = "updated"
    UPDATE_FAILED = "update failed"


_H, _E = Health, HealthEvent
_ALIVE = {
    _E.LOST: _H.DEAD,
    _E.EVACUATED: _H.DEAD,
    _E.UPDATED: _H.HEALTHY,
    _E.UPDATE_FAILED: _H.STALE,
}
_LATE_NEWS = (_E.ANSWERED, _E.LATE, _E.UPDATED, _E.UPDATE_FAILED)
"""Late events of a process that has exited; they change nothing."""
TRANSITIONS: Mapping[Health, Mapping[HealthEvent, Health]] = MappingProxyType(
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
"""State -> event -> next state; events that are missing cannot happen in the state."""


def follow(health: Health, event: HealthEvent) -> Health:
    """Return the next state.

    Raises:
        ValueError: If the event cannot happen in this state.
    """
    if (following := TRANSITIONS[health].get(event)) is None:
        raise ValueError(
            f"an instance in the state {health.value!r} cannot receive the event {event.value!r}"
        )
    return following


class SupervisionPolicy(ProbePolicy, frozen=True, kw_only=True):
    """Limits after which an instance is suspected, declared dead and rebuilt. Times in seconds.

    Raises:
        ValueError: If not ``0 < probe_every_s <= suspect_s < dead_s``, or a limit is negative.
    """

    suspect_s: float = 10.0
    """Silence after which an instance is suspect: it keeps its requests, receives no new ones."""
    max_restarts: int = 3
    """Restarts of an instance within ``restart_window_s``; beyond them it stays dead until the
    window has room. The first restart after a drain for preemption does not count.
    """
    restart_window_s: float = 3600.0
    """Length of the sliding window that ``max_restarts`` refers to."""
    restart_pause_s: float = 1.0
    """Pause before the first restart; doubled with each further one within the window."""

    def __post_init__(self) -> None:
        if not 0 < self.probe_every_s <= self.suspect_s < self.dead_s:
            raise ValueError(
                f"probe_every_s is {self.probe_every_s:g}, suspect_s {self.suspect_s:g}, dead_s "
                f"{self.dead_s:g}; expected 0 < probe_every_s <= suspect_s < dead_s"
            )
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts}; expected 0 or more")
