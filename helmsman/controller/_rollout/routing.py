"""Policies that choose the instance for a request."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from helmsman.controller._rollout.request import Instance, Ticket


class RoutingPolicy(Protocol):
    """Chooses the instance for a request."""

    def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
        """Return the instance for a request.

        Args:
            ticket: The request.
            able: Instances that are serving and have room; never empty.

        Returns:
            One of ``able``.
        """


class LeastOutstandingTokens(RoutingPolicy):
    """Choose the instance with the fewest outstanding tokens.

    Outstanding tokens are the held and expected tokens of all requests of an instance. Ties, which
    are common in an idle cluster, go to the instance that received a request least recently.
    """

    def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
        return min(able, key=lambda each: (each.outstanding_tokens, each.last_turn))


class RoundRobin(RoutingPolicy):
    """Choose the instances in turn, by id, regardless of load."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
        in_order = sorted(able, key=lambda each: each.instance_id)
        chosen = next((each for each in in_order if each.instance_id > self._last), in_order[0])
        self._last = chosen.instance_id
        return chosen


class _Affinity:
    """Maps keys to instances, with bounded loads (arXiv:1608.01350)."""

    def __init__(self, load_factor: float, max_entries: int) -> None:
        if load_factor < 1.0:
            raise ValueError(
                f"load_factor is {load_factor:g}; expected 1 or more, as a multiple of the mean "
                "load"
            )
        self._load_factor, self._max_entries = load_factor, max_entries
        self._homes: OrderedDict[str | bytes, str] = OrderedDict()
        self._spill = LeastOutstandingTokens()

    def at_home(
        self, keys: Sequence[str | bytes], ticket: Ticket, able: Sequence[Instance]
    ) -> Instance:
        """Return the instance of the first key whose instance is able and within the load bound.

        If there is none, return the least loaded instance. All keys then map to the result.
        """
        by_id = {each.instance_id: each for each in able}
        limit = self._load_factor * (
            sum(each.outstanding_tokens for each in able) / len(able) + ticket.num_tokens
        )
        for key in keys:
            home = by_id.get(self._homes.get(key, ""))
            if home is not None and home.outstanding_tokens + ticket.num_tokens <= limit:
                break
        else:
            home = self._spill.choose(ticket, able)
        for key in keys:
            self._homes[key] = home.instance_id
            self._homes.move_to_end(key)
        while len(self._homes) > self._max_entries:
            self._homes.popitem(last=False)
        return home


class PrefixAffinity(RoutingPolicy):
    """Choose the instance that last received the longest known prefix of the prompt.

    Its prefix cache may still hold that prefix.

    Args:
        block_tokens: Block size in tokens; prefixes are compared in whole blocks.
        load_factor: Bound on the load of an instance, as a multiple of the mean load; 1 or more.
            A request that would exceed it goes to the least loaded instance.
        max_entries: Number of prefixes to remember; the least recently used are evicted first.

    Raises:
        ValueError: If ``block_tokens`` or ``load_factor`` is below 1.
    """

    def __init__(
        self, *, block_tokens: int = 64, load_factor: float = 1.25, max_entries: int = 100_000
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; expected 1 or more")
        self._block_tokens = block_tokens
        self._affinity = _Affinity(load_factor, max_entries)

    def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
        return self._affinity.at_home(self._prefixes(ticket.request.prompt_ids), ticket, able)

    def _prefixes(self, tokens: Sequence[int]) -> list[str | bytes]:
        """Return a digest of each prefix of whole blocks, longest first.

        A prompt shorter than one block has a single digest, that of the whole prompt.
        """
        digest, found = hashlib.blake2b(digest_size=16), []
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            digest.update(array("q", tokens[start : start + self._block_tokens]).tobytes())
            found.append(digest.digest())
        if not found:
            digest.update(array("q", tokens).tobytes())
            found.append(digest.digest())
        return [*reversed(found)]


class SessionAffinity(RoutingPolicy):
    """Choose the instance that received the earlier requests of the session.

    Requests without a session go to the least loaded instance.

    Args:
        load_factor: Bound on the load of an instance, as a multiple of the mean load; 1 or more.
            A request that would exceed it moves its session to the least loaded instance.
        max_entries: Number of sessions to remember; the least recently used are evicted first.

    Raises:
        ValueError: If ``load_factor`` is below 1.
    """

    def __init__(self, *, load_factor: float = 1.5, max_entries: int = 100_000) -> None:
        self._affinity = _Affinity(load_factor, max_entries)

    def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
        return self._affinity.at_home(
            [ticket.options.session] if ticket.options.session else [], ticket, able
        )
