"""Tests of the states of a request, and of tickets that have several attempts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmsman.api.generation import GenerationRequest, SamplingParams
from helmsman.controller._rollout.request import TRANSITIONS, RequestState, Ticket
from tests.unit.controller.rollout.backends import make_request, make_result, make_ticket

S = RequestState
ENDS = {S.DONE, S.PARTIAL, S.ABORTED, S.FAILED}
EARLY = {S.PARTIAL, S.ABORTED, S.FAILED}
LEGAL = {
    *((S.QUEUED, after) for after in (S.ADMITTED, *EARLY)),
    *((S.ADMITTED, after) for after in (S.QUEUED, S.RUNNING, *EARLY)),
    *((S.RUNNING, after) for after in (S.QUEUED, S.DONE, *EARLY)),
}
PATH_TO: dict[RequestState, Sequence[RequestState]] = {
    S.QUEUED: (),
    S.ADMITTED: (S.ADMITTED,),
    S.RUNNING: (S.ADMITTED, S.RUNNING),
    S.DONE: (S.ADMITTED, S.RUNNING, S.DONE),
    S.PARTIAL: (S.ADMITTED, S.RUNNING, S.PARTIAL),
    S.ABORTED: (S.ABORTED,),
    S.FAILED: (S.FAILED,),
}
"""State -> the transitions that lead to it."""


def in_state(state: RequestState) -> Ticket:
    ticket = make_ticket()
    for step in PATH_TO[state]:
        ticket.transition(step)
    return ticket


# --- states ---------------------------------------------------------------------------------------


def test_transitions() -> None:
    assert set(TRANSITIONS) == set(RequestState) == set(PATH_TO)
    assert {(before, after) for before, afters in TRANSITIONS.items() for after in afters} == LEGAL


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(S, S)), ids=lambda state: state.value
)
def test_ticket_transition(before: RequestState, after: RequestState) -> None:
    ticket = in_state(before)
    assert (before.is_end, ticket.is_running) == (before in ENDS, before is S.RUNNING)
    if (before, after) in LEGAL:
        ticket.transition(after)
        assert ticket.state is after
    else:
        with pytest.raises(AssertionError, match="r: "):
            ticket.transition(after)
        assert ticket.state is before


# --- order and weight -----------------------------------------------------------------------------


def test_ticket_order() -> None:
    first = make_ticket()
    urgent = make_ticket(priority=5)
    second = make_ticket()
    later = make_ticket(priority=-1)
    assert sorted([later, second, urgent, first], key=lambda ticket: ticket.order) == [
        urgent,
        first,
        second,
        later,
    ]


def test_ticket_num_tokens() -> None:
    request = make_request("r", prompt=[1] * 10, max_new_tokens=50)
    assert make_ticket(request).num_tokens == 60
    assert make_ticket(request, expected_tokens=7).num_tokens == 17
    assert make_ticket(request, expected_tokens=0).num_tokens == 10


# --- attempts -------------------------------------------------------------------------------------


def test_ticket_to_send_first_attempt() -> None:
    ticket = make_ticket()
    assert ticket.to_send() is ticket.request
    ticket.keep(make_result("r", [], stop_reason="abort"))
    assert ticket.to_send() is ticket.request


def test_ticket_merged() -> None:
    ticket = make_ticket(make_request("r", prompt=[1, 2], max_new_tokens=8))
    ticket.keep(make_result("r", [10, 11], version=3, stop_reason="abort"))
    ticket.keep(make_result("r", [12], version=4, stop_reason="abort"))
    merged = ticket.merged(make_result("r", [13, 14], version=6))
    assert merged.token_ids == [10, 11, 12, 13, 14]
    assert merged.logprobs == [-0.10, -0.11, -0.12, -0.13, -0.14]
    assert merged.versions == [3, 3, 4, 6, 6]
    assert merged.stop_reason == "stop"
    assert merged.request_id == "r"


@pytest.mark.parametrize(("stop_reason", "expected"), [(None, "abort"), ("length", "length")])
def test_ticket_merged_without_a_last_result(stop_reason: str | None, expected: str) -> None:
    ticket = make_ticket()
    ticket.keep(make_result("r", [10], version=3, stop_reason="abort"))
    merged = ticket.merged(None, stop_reason)  # type: ignore[arg-type]
    assert (merged.token_ids, merged.versions, merged.stop_reason) == ([10], [3], expected)


def test_ticket_to_send_next_attempt() -> None:
    sampling = SamplingParams(
        max_new_tokens=8, temperature=0.5, top_k=3, top_p=0.9, stop_token_ids=(9,), seed=4
    )
    request = GenerationRequest(request_id="r", prompt_ids=[1, 2], sampling=sampling)
    ticket = make_ticket(request)
    ticket.keep(make_result("r", [10, 11], stop_reason="abort"))
    ticket.keep(make_result("r", [12], stop_reason="abort"))
    sent = ticket.to_send()
    assert sent.request_id == "r"
    assert sent.prompt_ids == [1, 2, 10, 11, 12]
    assert sent.sampling == SamplingParams(
        max_new_tokens=5, temperature=0.5, top_k=3, top_p=0.9, stop_token_ids=(9,), seed=4
    )
    assert request.prompt_ids == [1, 2], "the submitted request is unchanged"


@settings(max_examples=50)
@given(limit=st.integers(1, 60), pieces=st.lists(st.integers(0, 20), max_size=8))
def test_ticket_attempts_keep_the_limit(limit: int, pieces: list[int]) -> None:
    ticket = make_ticket(make_request("r", prompt=[1], max_new_tokens=limit))
    for version, num_tokens in enumerate(pieces):
        if ticket.num_kept == limit:
            break
        sent = ticket.to_send()
        assert sent.sampling.max_new_tokens == limit - ticket.num_kept
        assert len(sent.prompt_ids) == 1 + ticket.num_kept
        num = min(num_tokens, sent.sampling.max_new_tokens)
        ticket.keep(make_result("r", [version] * num, version=version, stop_reason="abort"))
    merged = ticket.merged(None)
    assert (
        len(merged.token_ids)
        == len(merged.logprobs)
        == len(merged.versions)
        == ticket.num_kept
        <= limit
    )
    assert merged.versions == merged.token_ids == sorted(merged.token_ids)
