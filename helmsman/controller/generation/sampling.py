"""Which episodes are started, kept, handed over and thrown away: the rules of asynchronous batches as one object."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """What a workflow made of an item."""

    item: Any
    value: Any
    """What the workflow returned; never None."""
    number: int
    """In the order of the starts."""
    version: int
    """Weight version when it was started: none of its tokens is older."""


class Pipe(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a WorkflowExecutor, as its sampler sees it."""

    version: int
    """Weight version that is served."""
    batch_size: int
    num_running: int
    oldest_running: int | None
    """Smallest version of those that run."""
    num_waiting: int
    """Ended, kept, and not handed over."""
    num_used: int
    """Handed over so far."""


class Sampler(Protocol):
    """Decides what flows through a WorkflowExecutor."""

    def admit(self, pipe: Pipe) -> int:
        """How many more episodes may be started now."""

    def keep(self, episode: Episode) -> bool:
        """Whether an episode that has ended is of use; another is started for one that is not."""

    def evict(self, waiting: Sequence[Episode], pipe: Pipe) -> Sequence[Episode]:
        """Which of those that wait are of no use any more; others are started for them."""

    def select(self, waiting: Sequence[Episode], pipe: Pipe) -> Sequence[Episode]:
        """The next batch, ``batch_size`` of those that wait; none when it has to wait for others."""


class BoundedStaleness:
    """Oldest first, and nothing that was begun more than ``max_staleness`` weight versions before it is used.

    With weights at version v, at most ``(v + 1 + max_staleness) * batch_size`` episodes have been begun: each step uses one
    batch and adds one version, so none of them is too old when its turn comes (AReaL, arXiv:2505.24298). 0 is synchronous; with
    a fraction so much of the next batch begins early.

    A slow episode is left to a later batch while it may be used there, and waited for when it may not. So none is thrown away
    for being long, and the lengths that are trained on are the policy's. ``takes_first=True`` takes whatever has ended, and
    drops what grows too old: it never waits for a straggler, and favours short episodes.

    Args:
        max_staleness: weight versions.
        keep: whether an episode is of use, such as one of a group whose rewards differ (DAPO, arXiv:2503.14476).
    """

    def __init__(
        self, max_staleness: float = 0.0, *, keep: Callable[[Episode], bool] | None = None, takes_first: bool = False
    ) -> None:
        if not max_staleness >= 0.0:
            raise ValueError(f"max_staleness is {max_staleness:g}; expected 0 weight versions or more")
        self.max_staleness = max_staleness
        self._oldest = math.ceil(max_staleness)
        self._keep, self._takes_first = keep, takes_first

    def admit(self, pipe: Pipe) -> int:
        """See Sampler."""
        most = math.floor((pipe.version + 1 + self.max_staleness) * pipe.batch_size)
        return max(0, most - pipe.num_used - pipe.num_waiting - pipe.num_running)

    def keep(self, episode: Episode) -> bool:
        """See Sampler."""
        return self._keep is None or self._keep(episode)

    def evict(self, waiting: Sequence[Episode], pipe: Pipe) -> Sequence[Episode]:
        """See Sampler."""
        return [each for each in waiting if pipe.version - each.version > self._oldest]

    def select(self, waiting: Sequence[Episode], pipe: Pipe) -> Sequence[Episode]:
        """See Sampler."""
        if len(waiting) < pipe.batch_size:
            return ()
        if self._takes_first:
            return waiting[: pipe.batch_size]
        if pipe.oldest_running is not None and pipe.version - pipe.oldest_running >= self._oldest:
            return ()  # it would be too old for the batch after this one
        return sorted(waiting, key=lambda each: each.number)[: pipe.batch_size]
