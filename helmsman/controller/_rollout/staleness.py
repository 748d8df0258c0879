"""Batch policies: which episodes are started, kept, batched, evicted and stopped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

_ROUNDING = 1e-9
"""1.15 * 100 is a little less than 115."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """A completed episode: an item and the value that the workflow returned for it."""

    item: Any
    value: Any
    """Return value of the workflow; never None."""
    number: int
    """Sequence number, in the order of starts."""
    version: int
    """Weight version at its start; none of its tokens is older."""


class ExecutorState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a WorkflowExecutor, as passed to its batch policy."""

    version: int
    """Weight version served now."""
    batch_size: int
    has_batch: bool
    """Whether a batch was returned since the weights have this version."""
    running: Mapping[int, int]
    """Number of each running episode, in the order of starts -> weight version at its start. This
    is a live view: read it before returning.
    """
    num_waiting: int
    """Episodes that completed and were kept, but are in no batch yet."""
    num_used: int
    """Episodes in batches so far."""


class BatchPolicy(Protocol):
    """Decides which episodes a WorkflowExecutor starts, keeps, batches and stops.

    The executor calls it again after every change of its state.
    """

    def admit(self, state: ExecutorState) -> int:
        """Return the number of further episodes to start now."""

    def keep(self, episode: Episode) -> bool:
        """Return whether to keep a completed episode; a rejected one is replaced."""

    def evict(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[Episode]:
        """Return the waiting episodes to discard; they are replaced.

        Args:
            waiting: Completed episodes that are in no batch, in the order in which they ended.
            state: State of the executor.

        Returns:
            A subset of ``waiting``.
        """

    def stop(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[int]:
        """Return the running episodes to cancel; they are replaced.

        Args:
            waiting: Completed episodes that are in no batch, in the order in which they ended.
            state: State of the executor.

        Returns:
            Their numbers, from ``state.running``.
        """

    def select(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[Episode]:
        """Return the next batch.

        Args:
            waiting: Completed episodes that are in no batch, in the order in which they ended.
            state: State of the executor.

        Returns:
            ``state.batch_size`` of ``waiting``, or an empty list to wait for further episodes.
        """


class BoundedStaleness(BatchPolicy):
    """Bounds the age of the episodes in a batch to ``max_staleness`` weight versions.

    Until the batch of a version is returned, at most ``(1 + max_staleness) * batch_size`` episodes
    run or wait; after it, ``max_staleness * batch_size``. With one batch per version, this is
    AReaL's bound: ``(version + 1 + max_staleness) * batch_size`` starts in total
    (arXiv:2505.24298). 0 is synchronous; a fraction starts that share of the next batch early.

    **In the order of starts**, the default, batches have no length bias. A slow episode is left to
    a later batch while later batches have room for all episodes of its age; otherwise the batch
    waits for it. No episode is discarded for being long, so batches keep the length distribution of
    the policy under training.

    **In the order of ends** (``takes_first``), a batch takes the episodes that ended first, and
    episodes that become too old are dropped. It never waits for a straggler. It favours short
    episodes, the more so the more are started per batch.

    **Over-sampling** starts ``(oversample - 1) * batch_size`` spare episodes. A batch is returned
    as soon as its rule is met, regardless of the episodes still running. In the order of starts, a
    spare replaces an episode that was rejected or failed, without a new start, and is never
    preferred for ending early. So a batch does not wait for replacements and stays free of length
    bias. In the order of ends, the first to end form the batch. Left-over episodes continue and
    enter later batches as far as the bound allows; those that become too old are stopped.

    Args:
        max_staleness: Maximum age of an episode, counted from its start, in weight versions; 0 or
            more.
        keep: Returns whether to keep an episode, for example a group whose rewards differ (DAPO,
            arXiv:2503.14476); None keeps all. A filter that correlates with length introduces a
            length bias; so do episode time-outs.
        takes_first: Form batches in the order of ends instead of starts.
        oversample: Episodes started for a batch, as a multiple of its size; 1 or more.
        stops_rest: When a batch is returned, stop the episodes beyond the bound at once instead of
            when they are too old. The last started are stopped, also with ``takes_first``.

    Raises:
        ValueError: If ``max_staleness`` or ``oversample`` is out of range.
    """

    def __init__(
        self,
        max_staleness: float = 0.0,
        *,
        keep: Callable[[Episode], bool] | None = None,
        takes_first: bool = False,
        oversample: float = 1.0,
        stops_rest: bool = False,
    ) -> None:
        if not 0.0 <= max_staleness < math.inf:
            raise ValueError(
                f"max_staleness is {max_staleness:g}; expected 0 weight versions or more"
            )
        if not 1.0 <= oversample < math.inf:
            raise ValueError(
                f"oversample is {oversample:g}; expected 1 or more, as a multiple of the batch size"
            )
        self.max_staleness, self.oversample = max_staleness, oversample
        self._oldest = math.ceil(max_staleness)
        self._keep, self._takes_first, self._stops_rest = keep, takes_first, stops_rest

    def admit(self, state: ExecutorState) -> int:
        num_batches = self.max_staleness + (0.0 if state.has_batch else self.oversample)
        return max(
            0,
            math.floor(num_batches * state.batch_size + _ROUNDING)
            - state.num_waiting
            - len(state.running),
        )

    def keep(self, episode: Episode) -> bool:
        return self._keep is None or self._keep(episode)

    def evict(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[Episode]:
        rest = self._rest(waiting, state)
        return [
            each
            for each in waiting
            if state.version - each.version > self._oldest or each.number in rest
        ]

    def stop(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[int]:
        old = itertools.takewhile(
            lambda each: state.version - each[1] > self._oldest, state.running.items()
        )
        return [*{number for number, _ in old} | self._rest(waiting, state) & state.running.keys()]

    def select(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[Episode]:
        if len(waiting) < state.batch_size:
            return ()
        if self._takes_first:
            return waiting[: state.batch_size]
        ended = {each.number: each for each in waiting}
        num_counted, batch = 0, list[Episode]()
        for number, begun in _in_order(waiting, state):
            # Episodes of this age or older fit into this batch and the later ones that come before
            # they are too old. An episode that does not fit is spare: it is used only if an
            # earlier one fails.
            room_later = (begun + self._oldest - state.version) * state.batch_size
            if num_counted >= room_later + state.batch_size:
                continue
            num_counted += 1
            if number in ended and len(batch) < state.batch_size:
                batch.append(ended[number])
            if num_counted - len(batch) > room_later:
                return ()
        return batch if len(batch) == state.batch_size else ()

    def _rest(self, waiting: Sequence[Episode], state: ExecutorState) -> frozenset[int]:
        """Return the episodes that ``stops_rest`` stops: the last started, beyond the bound."""
        if not (self._stops_rest and state.has_batch):
            return frozenset()
        bound = math.floor(self.max_staleness * state.batch_size + _ROUNDING)
        num_kept, rest = 0, set[int]()
        for number, begun in _in_order(waiting, state):
            if num_kept < min(bound, (begun + self._oldest - state.version) * state.batch_size):
                num_kept += 1  # A batch of a later version may use it.
            else:
                rest.add(number)
        return frozenset(rest)


def _in_order(waiting: Sequence[Episode], state: ExecutorState) -> list[tuple[int, int]]:
    """Return (number, version at start) of all running or waiting episodes, in order of starts."""
    return sorted([*state.running.items(), *((each.number, each.version) for each in waiting)])
