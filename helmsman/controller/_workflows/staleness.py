"""Which episodes are started, kept, handed over, thrown away and stopped: the rules of asynchronous
batches as one object.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

_ROUNDING = 1e-9
"""1.15 * 100 is a little less than 115."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """What a workflow made of an item."""

    item: Any
    value: Any
    """What the workflow returned; never None."""
    number: int
    """In the order of the starts."""
    version: int
    """Weight version when it was started: none of its tokens is older."""


class ExecutorState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a WorkflowExecutor, as its batch policy sees it."""

    version: int
    """Weight version that is served."""
    batch_size: int
    has_batch: bool
    """Whether a batch was handed over since the weights are of this version."""
    running: Mapping[int, int]
    """Number of each episode that runs, in the order of the starts -> version at its start. A view,
    to be read at once.
    """
    num_waiting: int
    """Ended, kept, and not handed over."""
    num_used: int
    """Handed over so far."""


class BatchPolicy(Protocol):
    """Decides what flows through a WorkflowExecutor, which asks it again whenever something has
    changed.
    """

    def admit(self, state: ExecutorState) -> int:
        """How many more episodes may be started now."""

    def keep(self, episode: Episode) -> bool:
        """Whether an episode that has ended is of use; another is started for one that is not."""

    def evict(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[Episode]:
        """Which of those that wait are of no use any more; others are started for them."""

    def stop(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[int]:
        """Numbers of those that run and are of no use any more: they are cancelled, and others are
        started for them.
        """

    def select(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[Episode]:
        """The next batch, ``batch_size`` of those that wait (in the order in which they ended);
        none when it has to wait for others.
        """


class BoundedStaleness:
    """Oldest first, and nothing that was begun more than ``max_staleness`` weight versions before
    it is used.

    At most ``(1 + max_staleness) * batch_size`` episodes run or wait until the batch of a version
    is handed over, and ``max_staleness * batch_size`` from then on. With one batch for each version
    this is AReaL's bound, ``(version + 1 + max_staleness) * batch_size`` begun in all
    (arXiv:2505.24298). 0 is synchronous; with a fraction so much of the next batch begins early.

    **By the order of starts**, the default, has no bias by length. A batch waits for a slow episode
    as soon as later batches could not take all that are as old as it is, and leaves it to them
    before. So none is thrown away for being long, and the lengths that are trained on are the
    policy's.

    **By the order of ends** (``takes_first``) is a batch of whatever has ended, and drops what
    grows too old: it never waits for a straggler, and favours short episodes, the more so the more
    are begun for a batch.

    **Over-sampling** begins ``(oversample - 1) * batch_size`` spare episodes. A batch is handed
    over as soon as the rule is met, whatever else runs. By the order of starts a spare one takes
    the place of one that was filtered or has failed, at once and without a fresh start, and is
    never preferred for having ended early; so a batch waits for no replacement, and its lengths are
    the policy's still. By the order of ends the first to end are the batch. What is left goes on,
    and is used by later batches as far as the bound lets; what is too old is stopped.

    Args:
        max_staleness: weight versions.
        keep: whether an episode is of use, such as one of a group whose rewards differ (DAPO,
            arXiv:2503.14476). What it asks for may well go with length, which is then a bias that
            it brings; so do time-outs of episodes.
        takes_first: by the order of ends.
        oversample: how many times the episodes of a batch are begun for it; 1 or more.
        stops_rest: once a batch is handed over, stop at once what is beyond the bound, instead of
            letting it go on until it is too old. Chosen by the order of starts, with or without
            ``takes_first``.
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
                f"oversample is {oversample:g}; expected 1 or more, times the episodes of a batch"
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
            # For all that are as old as this one, or older, there is room in this batch and in
            # those that come before they are too old. What does not fit is spare: in no batch,
            # unless one before it fails.
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
        """What is beyond the bound once a batch is handed over, and is to be stopped then: the last
        in the order of starts.
        """
        if not (self._stops_rest and state.has_batch):
            return frozenset()
        bound = math.floor(self.max_staleness * state.batch_size + _ROUNDING)
        num_kept, rest = 0, set[int]()
        for number, begun in _in_order(waiting, state):
            if num_kept < min(bound, (begun + self._oldest - state.version) * state.batch_size):
                num_kept += 1  # a batch of a later version may have it
            else:
                rest.add(number)
        return frozenset(rest)


def _in_order(waiting: Sequence[Episode], state: ExecutorState) -> list[tuple[int, int]]:
    """(number, version at the start) of all that run or wait, in the order of the starts."""
    return sorted([*state.running.items(), *((each.number, each.version) for each in waiting)])
