"""Open work of this process that no call of a worker shows: episodes, sessions, tools, rewards.

An item costs an entry of a dictionary; everything else is computed when someone asks.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from helmsman.api.run_state import RunReporter, WaitSnapshot

K = TypeVar("K")

_REMEMBERED = 32


class Open(NamedTuple):
    """An item that has not ended."""

    number: int
    since: float
    """time.monotonic() at its begin, or when its worker began to compute it."""
    shown: object
    """Its item or name, whose text is made when it is displayed."""
    task: asyncio.Task[Any] | None = None
    """The task that shows what it awaits."""
    doing: str = ""
    """Its wait as a predicate, if it has no task."""
    moved: float = 0.0
    """time.monotonic() of its last known progress; 0.0 if it is unknown."""
    worker_id: str = ""
    """The worker that computes it."""
    is_explained: bool = False
    """Whether it waits for other items of the source."""
    opener: asyncio.Task[Any] | None = None
    """The task that waits for the item, whose progress counts as its own, too."""
    is_served: bool = False
    """Whether work for the opener runs now, such as a turn of the model."""


class WorkSource(Protocol):
    """Has open items; its methods are called from any thread."""

    kind: str
    name: str
    reporter: RunReporter | None
    """The reporter of the scheduler whose workers compute the items."""

    has_openers: bool
    """Whether its items have openers."""

    def __len__(self) -> int:
        """Return the number of open items."""

    def open_items(self, most: int | None = None) -> list[Open]:
        """Return the open items, oldest first, or as many of them."""

    def finished(self) -> tuple[int, float | None]:
        """Return the number of items that have ended, and the median of recent durations."""

    def waits(self) -> list[tuple[WaitSnapshot, asyncio.Task[Any] | None]]:
        """Return the calls that wait for items, oldest first, with their tasks."""


_sources: weakref.WeakSet[WorkSource] = weakref.WeakSet()
_lock = threading.Lock()


def follow(source: WorkSource) -> None:
    """Show a source in the snapshots of all runs of this process while it is referenced."""
    with _lock:
        _sources.add(source)


def sources() -> list[WorkSource]:
    """Return the sources of this process."""
    with _lock:
        return list(_sources)


class Ledger(Generic[K]):
    """Open items of one kind, and the calls that wait for them.

    Args:
        kind: Kind of the items, such as 'episode'.
        name: Name of the source.
        reporter: Reporter of the scheduler whose workers compute the items.
    """

    has_openers = False

    def __init__(self, kind: str, name: str, reporter: RunReporter | None = None) -> None:
        self.kind, self.name, self.reporter = kind, name, reporter
        self._open: dict[K, tuple[Any, ...]] = {}
        """The first fields of an Open, which costs more to make."""
        self._numbers = itertools.count()
        self._num_done = 0
        self._durations = collections.deque[float](maxlen=_REMEMBERED)
        self._waits: dict[Callable[[], WaitSnapshot], asyncio.Task[Any] | None] = {}
        self._waited = collections.deque[float](maxlen=_REMEMBERED)
        follow(self)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys of the open items."""
        return iter(list(self._open))

    def begin(
        self,
        key: K,
        shown: object,
        task: asyncio.Task[Any] | None = None,
        number: int | None = None,
    ) -> None:
        """Add an item, with the task that shows what it awaits; ``end`` removes it."""
        number = next(self._numbers) if number is None else number
        self._open[key] = number, time.monotonic(), shown, task

    def queue(self, key: K, shown: object) -> None:
        """Add an item that waits for a worker."""
        doing = "waits for a free worker"
        number, now = next(self._numbers), time.monotonic()
        self._open[key] = Open(number, now, shown, doing=doing, is_explained=True)

    def place(self, key: K, worker_id: str) -> None:
        """Note the worker that computes a queued item from now on."""
        number, _, shown, *_ = self._open[key]
        now, doing = time.monotonic(), f"runs on {worker_id}"
        self._open[key] = Open(number, now, shown, doing=doing, worker_id=worker_id)

    def end(self, key: K) -> None:
        """Remove an item. Idempotent."""
        if (item := self._open.pop(key, None)) is not None:
            self._num_done += 1
            self._durations.append(time.monotonic() - item[1])

    @contextlib.contextmanager
    def waiting(
        self, call: str, num_wanted: int, ready: Callable[[], tuple[int, str]]
    ) -> Iterator[None]:
        """Show a call that waits for items while the body runs.

        Args:
            call: Its name.
            num_wanted: Number of items that it waits for.
            ready: Returns how many it has, and a remark; called from any thread.
        """
        since = time.monotonic()

        def describe() -> WaitSnapshot:
            num_ready, remark = ready()
            return WaitSnapshot(
                call=call,
                age_s=time.monotonic() - since,
                median_s=_median(self._waited),
                num_ready=num_ready,
                num_wanted=num_wanted,
                remark=remark,
            )

        self._waits[describe] = asyncio.current_task()
        try:
            yield
        finally:
            del self._waits[describe]
            self._waited.append(time.monotonic() - since)

    def open_items(self, most: int | None = None) -> list[Open]:
        """Return the open items, oldest first, or as many of them."""
        return [Open(*each) for each in list(self._open.values())[:most]]

    def finished(self) -> tuple[int, float | None]:
        """Return the number of items that have ended, and the median of recent durations."""
        return self._num_done, _median(self._durations)

    def waits(self) -> list[tuple[WaitSnapshot, asyncio.Task[Any] | None]]:
        """Return the calls that wait for items, oldest first, with their tasks."""
        return [(describe(), task) for describe, task in list(self._waits.items())]


def _median(durations: collections.deque[float]) -> float | None:
    recent = list(durations)
    return statistics.median(recent) if recent else None
