"""Which instance takes a request: policies as objects, from the plainest on."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from helmsman.controller._generation.request import Instance, Ticket


class RoutingPolicy(Protocol):
    """Chooses among the instances that serve and have room, of which there is at least one."""

    def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
        """The instance that takes this request."""


class LeastOutstandingTokens:
    """The instance with the fewest tokens to come: held and expected ones of all requests that it
    has. Of equals, which an idle cluster is full of, the one that was given a request longest
    ago.
    """

    def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
        return min(able, key=lambda each: (each.outstanding_tokens, each.last_turn))


class RoundRobin:
    """Each instance in its turn, whatever it has."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
        in_order = sorted(able, key=lambda each: each.instance_id)
        chosen = next((each for each in in_order if each.instance_id > self._last), in_order[0])
        self._last = chosen.instance_id
        return chosen


class _Affinity:
    """Keeps what belongs together on one instance, while that is not overloaded (bounded loads,
    arXiv:1608.01350).
    """

    def __init__(self, load_factor: float, max_entries: int) -> None:
        if load_factor < 1.0:
            raise ValueError(
                f"load_factor is {load_factor:g}; expected 1 or more: how far an instance may be "
                "above the mean"
            )
        self._load_factor, self._max_entries = load_factor, max_entries
        self._homes: OrderedDict[str | bytes, str] = OrderedDict()
        self._spill = LeastOutstandingTokens()

    def at_home(
        self, keys: Sequence[str | bytes], ticket: Ticket, able: Sequence[Instance]
    ) -> Instance:
        """The home of the first key that has one, if it can take the request; else the least
        loaded, which becomes the home.
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


class PrefixAffinity:
    """The instance that last had the longest known prefix of the prompt, whose cache may still hold
    it.

    Args:
        block_tokens: prefixes are compared in blocks of so many tokens, as caches keep them.
        load_factor: an instance takes no more than so many times the mean load; what is beyond goes
            to the least loaded.
        max_entries: prefixes that are remembered, the latest ones.
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
        """A digest of each prefix of whole blocks, the longest first; of all of it where it is
        shorter than one.
        """
        digest, found = hashlib.blake2b(digest_size=16), []
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            digest.update(array("q", tokens[start : start + self._block_tokens]).tobytes())
            found.append(digest.digest())
        if not found:
            digest.update(array("q", tokens).tobytes())
            found.append(digest.digest())
        return [*reversed(found)]


class SessionAffinity:
    """The instance that has had the session's requests; requests without a session go to the least
    loaded.

    Args: as PrefixAffinity.
    """

    def __init__(self, *, load_factor: float = 1.5, max_entries: int = 100_000) -> None:
        self._affinity = _Affinity(load_factor, max_entries)

    def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
        return self._affinity.at_home(
            [ticket.options.session] if ticket.options.session else [], ticket, able
        )
