"""Test every pair of state and event of the state machine of an instance's weights."""

from __future__ import annotations

import pytest

from helmsman.api.weight_states import TRANSITIONS, WeightEvent, WeightState


def memory(state: WeightState) -> tuple[bool, bool]:
    return state.has_weight_memory, state.has_cache


def test_weight_state_all_pairs() -> None:
    """Each event changes memory and weights as its name states, and nothing else."""
    for state in WeightState:
        for event in WeightEvent:
            if (state, event) not in TRANSITIONS:
                assert not state.has_weight_memory
                assert event in (WeightEvent.UPDATED, WeightEvent.TORN)
                with pytest.raises(AssertionError, match="cannot be followed by"):
                    state.after(event)
                continue
            expected, is_whole = memory(state), state.is_whole
            match event:
                case WeightEvent.SLEPT:
                    expected = (False, False)
                case WeightEvent.DROPPED:
                    expected, is_whole = (False, False), False
                case WeightEvent.WOKE_WEIGHTS:
                    expected = (True, state.has_cache)
                case WeightEvent.WOKE:
                    expected = (True, True)
                case WeightEvent.UPDATED:
                    is_whole = True
                case WeightEvent.TORN:
                    is_whole = False
            following = state.after(event)
            assert (memory(following), following.is_whole) == (expected, is_whole), (state, event)
            assert following.is_serving == (following.has_cache and following.is_whole)


def test_weight_states_are_distinct() -> None:
    assert len({(memory(state), state.is_whole) for state in WeightState}) == len(WeightState) == 6
