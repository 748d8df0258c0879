"""State machine of a rollout instance's memory and weights, for its controller and engines."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class WeightEvent(Enum):
    """An event that changes the memory or the weights of an instance."""

    SLEPT = "slept"
    """Sleep at level 1: all device memory is freed, and the weights stay on the host."""
    DROPPED = "dropped"
    """Sleep at level 2: all device memory is freed, and the weights are dropped."""
    WOKE_WEIGHTS = "woke for weights"
    """The memory for the weights is allocated again."""
    WOKE = "woke"
    """The memory for weights and cache is allocated again."""
    UPDATED = "updated"
    """A weight update is complete."""
    TORN = "torn"
    """A weight update has changed only part of the weights."""


class WeightState(Enum):
    """States of an instance: which memory it has, and whether its weights are whole.

                       SLEPT                  WOKE_WEIGHTS                   WOKE
        AWAKE ----------------> ASLEEP ----------------> WARM ----------------> AWAKE
          |  ^                    |                      |  ^
     TORN |  | UPDATED            | DROPPED         TORN |  | UPDATED
          v  |                    v                      v  |
        AWAKE_EMPTY ----------> ASLEEP_EMPTY ----------> WARM_EMPTY ----------> AWAKE_EMPTY
                       SLEPT                  WOKE_WEIGHTS                   WOKE

    WOKE also leads from ASLEEP to AWAKE, and SLEPT from WARM to ASLEEP.
    DROPPED leads to ASLEEP_EMPTY from everywhere. An instance that sleeps cannot be updated.
    """

    AWAKE = "awake"
    """It serves."""
    AWAKE_EMPTY = "awake without whole weights"
    """It accepts requests, and serves them once an update is complete."""
    ASLEEP = "asleep"
    ASLEEP_EMPTY = "asleep without weights"
    WARM = "awake for its weights alone"
    """It has no cache, accepts no request, and can be updated."""
    WARM_EMPTY = "awake for its weights alone, which it lacks"

    @property
    def is_serving(self) -> bool:
        """Whether it can generate."""
        return self is WeightState.AWAKE

    @property
    def has_cache(self) -> bool:
        """Whether it accepts requests."""
        return self in (WeightState.AWAKE, WeightState.AWAKE_EMPTY)

    @property
    def has_weight_memory(self) -> bool:
        """Whether it can be updated."""
        return self not in (WeightState.ASLEEP, WeightState.ASLEEP_EMPTY)

    @property
    def is_whole(self) -> bool:
        """Whether it needs no update before it serves."""
        return self in (WeightState.AWAKE, WeightState.ASLEEP, WeightState.WARM)

    def after(self, event: WeightEvent) -> WeightState:
        """Return the state after an event.

        Raises:
            AssertionError: The event cannot happen in this state.
        """
        following = TRANSITIONS.get((self, event))
        assert following is not None, f"{self} cannot be followed by {event}"
        return following


def _table() -> Mapping[tuple[WeightState, WeightEvent], WeightState]:
    awake, awake_empty, asleep, asleep_empty, warm, warm_empty = WeightState
    rows: dict[WeightState, tuple[WeightState | None, ...]] = {
        # Columns: SLEPT, DROPPED, WOKE_WEIGHTS, WOKE, UPDATED, TORN
        awake: (asleep, asleep_empty, awake, awake, awake, awake_empty),
        awake_empty: (asleep_empty, asleep_empty, awake_empty, awake_empty, awake, awake_empty),
        asleep: (asleep, asleep_empty, warm, awake, None, None),
        asleep_empty: (asleep_empty, asleep_empty, warm_empty, awake_empty, None, None),
        warm: (asleep, asleep_empty, warm, awake, warm, warm_empty),
        warm_empty: (asleep_empty, asleep_empty, warm_empty, awake_empty, warm, warm_empty),
    }
    cells = (
        (state, *cell) for state, row in rows.items() for cell in zip(WeightEvent, row, strict=True)
    )
    return MappingProxyType(
        {(state, event): following for state, event, following in cells if following is not None}
    )


TRANSITIONS = _table()
"""(state, event) -> next state. A missing pair cannot occur."""
