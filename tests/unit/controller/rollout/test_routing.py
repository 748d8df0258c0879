"""Tests of the routing policies: choice, affinity, spill-over and bounded memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmsman.controller._rollout.request import Instance, Ticket
from helmsman.controller._rollout.routing import (
    LeastOutstandingTokens,
    PrefixAffinity,
    RoundRobin,
    RoutingPolicy,
    SessionAffinity,
)
from tests.unit.controller.rollout import backends

BLOCK = 4


def instances(*outstanding: int) -> list[Instance]:
    """Return instances i0, i1... with these numbers of outstanding tokens."""
    made = [Instance(f"i{index}", capacity=1_000_000) for index in range(len(outstanding))]
    for instance, num in zip(made, outstanding, strict=True):
        instance.outstanding_tokens = num
    return made


def make_ticket(prompt: Sequence[int] = (1,), expected: int = 10, session: str = "") -> Ticket:
    return backends.make_ticket(
        backends.make_request("r", prompt=prompt), expected_tokens=expected, session=session
    )


def route(policy: RoutingPolicy, able: Sequence[Instance], **ticket: object) -> str:
    """Assign a ticket to the chosen instance, like the scheduler, and return the instance's id."""
    made = make_ticket(**ticket)  # type: ignore[arg-type]
    chosen = policy.choose(made, able)
    chosen.take(made)
    return chosen.instance_id


# --- load -----------------------------------------------------------------------------------------


def test_least_outstanding_tokens_counts_tokens() -> None:
    able = instances(0, 0, 0)
    able[0].take(make_ticket(expected=1000))
    able[1].take(make_ticket(expected=10))
    able[1].take(make_ticket(expected=10))
    able[2].take(make_ticket(expected=500))
    assert route(LeastOutstandingTokens(), able) == "i1"


def test_least_outstanding_tokens_among_equals() -> None:
    able, policy, seen = instances(0, 0, 0), LeastOutstandingTokens(), []
    for _ in range(9):
        ticket = make_ticket()
        chosen = policy.choose(ticket, able)
        chosen.take(ticket)
        chosen.give_back(ticket)
        seen.append(chosen.instance_id)
    assert seen == ["i0", "i1", "i2"] * 3


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    num=st.integers(1, 8),
)
def test_least_outstanding_tokens_balances(sizes: list[int], num: int) -> None:
    able = instances(*[0] * num)
    for size in sizes:
        route(LeastOutstandingTokens(), able, expected=size)
    loads = [each.outstanding_tokens for each in able]
    assert max(loads) - min(loads) <= max(sizes) + 1


def test_round_robin_skips_unable_instances() -> None:
    able, policy = instances(0, 9000, 0, 0), RoundRobin()
    assert [route(policy, able) for _ in range(5)] == ["i0", "i1", "i2", "i3", "i0"]
    assert route(policy, [able[0], able[3]]) == "i3"
    assert route(policy, [able[1], able[2]]) == "i1"
    assert route(policy, able) == "i2"


# --- prefixes -------------------------------------------------------------------------------------


def prefix_affinity(load_factor: float = 100.0, **options: int) -> PrefixAffinity:
    return PrefixAffinity(block_tokens=BLOCK, load_factor=load_factor, **options)


def test_prefix_affinity_longest_prefix() -> None:
    able, policy = instances(0, 0, 0), prefix_affinity()
    system, first, second = [1] * BLOCK, [2] * BLOCK, [3] * BLOCK
    assert route(policy, able, prompt=[*system, *first]) == "i0"
    able[0].outstanding_tokens = 1000
    assert route(policy, able, prompt=[*[9] * BLOCK, *second]) == "i1", (
        "an unknown prefix goes to the least loaded instance"
    )
    assert route(policy, able, prompt=[*system, *second]) == "i0", "i0 has the system prompt"
    able[0].outstanding_tokens = able[1].outstanding_tokens = 0
    policy.choose(make_ticket([*system, *first, *second]), [able[2]])
    assert route(policy, able, prompt=[*system, *first, *second, 7]) == "i2"
    assert route(policy, able, prompt=[*system, *second]) == "i0", "i0 has the longest prefix"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        *(
            ([*[1] * BLOCK, 7, 7], [*[1] * BLOCK, *tail], "i0")
            for tail in ([], [8], [8] * (BLOCK - 1))
        ),
        ([1, 2], [1, 2], "i0"),  # a prompt shorter than a block counts as one block
        ([1, 2], [1, 2, 3], "i1"),
        # the same block at another position
        (
            [*[1] * BLOCK, *[2] * BLOCK],
            [*[5] * BLOCK, *[2] * BLOCK],
            "i1",
        ),
    ],
)
def test_prefix_affinity_blocks(first: list[int], second: list[int], expected: str) -> None:
    """Only whole blocks match, each together with all blocks before it."""
    able, policy = instances(0, 0), prefix_affinity()
    assert route(policy, able, prompt=first) == "i0"
    assert route(policy, able, prompt=second) == expected


@pytest.mark.parametrize(
    "policy",
    [PrefixAffinity(block_tokens=BLOCK, load_factor=1.25), SessionAffinity(load_factor=1.25)],
)
def test_affinity_spills_over_the_load_factor(policy: RoutingPolicy) -> None:
    able = instances(0, 0, 0, 0)
    went = Counter(route(policy, able, prompt=[1] * BLOCK, session="one") for _ in range(400))
    mean = sum(each.outstanding_tokens for each in able) / 4
    weight = make_ticket([1] * BLOCK).num_tokens
    assert set(went) == {"i0", "i1", "i2", "i3"}
    assert max(each.outstanding_tokens for each in able) <= 1.25 * (mean + weight)
    assert max(went.values()) > 100, "affinity prevails until the limit"


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=30),
    num=st.integers(1, 5),
    load_factor=st.floats(1.0, 3.0),
)
def test_prefix_affinity_share_of_a_home(
    prompts: list[list[int]], num: int, load_factor: float
) -> None:
    able, policy = instances(*[0] * num), prefix_affinity(load_factor)
    for prompt in prompts:
        ticket = make_ticket(prompt)
        mean = sum(each.outstanding_tokens for each in able) / num
        least = min(each.outstanding_tokens for each in able)
        chosen = policy.choose(ticket, able)
        limit = load_factor * (mean + ticket.num_tokens)
        assert (
            chosen.outstanding_tokens == least
            or chosen.outstanding_tokens + ticket.num_tokens <= limit
        )
        chosen.take(ticket)


def test_prefix_affinity_replaces_a_home() -> None:
    able, policy = instances(0, 0), prefix_affinity()
    assert route(policy, able, prompt=[1] * BLOCK) == "i0"
    assert route(policy, able[1:], prompt=[1] * BLOCK) == "i1"
    assert route(policy, able, prompt=[1] * BLOCK) == "i1", "i1 has the warm cache now"


# --- sessions -------------------------------------------------------------------------------------


def test_session_affinity() -> None:
    able, policy = instances(0, 0, 0), SessionAffinity(load_factor=100.0)
    assert [route(policy, able, session=session) for session in ("a", "b", "a", "b", "a")] == [
        "i0",
        "i1",
        "i0",
        "i1",
        "i0",
    ]
    assert [route(policy, able) for _ in range(2)] == ["i2", "i2"]
    assert route(policy, able, session="a") == "i0"


# --- memory and arguments -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        PrefixAffinity(block_tokens=BLOCK, max_entries=100),
        SessionAffinity(max_entries=100),
        LeastOutstandingTokens(),
        RoundRobin(),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_policies_have_bounded_memory(policy: RoutingPolicy) -> None:
    """Old prompts, sessions and removed instances use no memory."""

    def route_requests(first: int) -> None:
        for number in range(first, first + 400):
            able = [Instance(f"i{number}", 10), Instance(f"j{number}", 10)]
            route(policy, able, prompt=list(range(number, number + 3 * BLOCK)), session=str(number))

    route_requests(0)
    tracemalloc.start()
    try:
        route_requests(10_000)
        before = tracemalloc.get_traced_memory()[0]
        route_requests(20_000)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 20_000


def test_session_affinity_evicts_the_least_recent() -> None:
    able, policy = instances(0, 0), SessionAffinity(load_factor=100.0, max_entries=2)
    assert route(policy, able, session="a") == "i0"
    assert route(policy, able, session="b") == "i1"
    assert route(policy, able, session="a") == "i0"
    route(policy, able[:1], session="c")
    able[0].outstanding_tokens = 1000
    assert route(policy, able, session="a") == "i0"
    able[0].outstanding_tokens, able[1].outstanding_tokens = 0, 1000
    assert route(policy, able, session="b") == "i0", "b was evicted"


def test_policies_refuse_invalid_arguments() -> None:
    for make in (PrefixAffinity, SessionAffinity):
        with pytest.raises(ValueError, match="load_factor is 0.9"):
            make(load_factor=0.9)
    with pytest.raises(ValueError, match="block_tokens is 0"):
        PrefixAffinity(block_tokens=0)


@given(prompt=st.lists(st.integers(0, 300_000), min_size=1, max_size=40))
def test_prefix_affinity_every_prompt_has_a_home(prompt: list[int]) -> None:
    able, policy = instances(0, 0, 0), prefix_affinity()
    home = route(policy, able, prompt=prompt)
    assert route(policy, able, prompt=prompt) == home
    assert route(policy, able, prompt=[*prompt, *[5] * 10]) == home or len(prompt) < BLOCK
