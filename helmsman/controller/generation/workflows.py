"""WorkflowExecutor: runs a user's async function per episode, many at once, and makes batches of what comes out."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from helmsman.api.errors import HelmsmanError, WorkflowFailuresError
from helmsman.controller.generation.sampling import BoundedStaleness, Episode, Pipe, Sampler

log = logging.getLogger(__name__)

T = TypeVar("T")

_STOP_S = 5.0

Workflow = Callable[[Any], Awaitable[Any]]
"""``async def workflow(item)``: what becomes of an item, or None when nothing of use does. It awaits generation
(``rollout.agenerate``), tools and rewards; what blocks belongs into ``asyncio.to_thread`` or a process pool."""


class WorkflowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of the episodes so far."""

    num_started: int
    num_running: int
    num_waiting: int
    num_used: int
    num_rejected: int
    """Without a value, or not kept by the sampler."""
    num_evicted: int
    """Grown too old."""
    num_failed: int


class WorkflowExecutor:
    """Runs episodes on an event loop and in a thread of its own, beside the training step.

    An exception in an episode is that episode's failure: it is logged and counted, and another episode takes its place, until
    more than ``max_failures`` of the last ``failure_window`` episodes have failed.

    Args:
        workflow: see Workflow.
        sampler: decides what is started, kept and handed over; BoundedStaleness(0) when None, which is synchronous.
        max_in_flight: episodes that run at once, at most.
        max_failures: failed episodes among the last ``failure_window``, beyond which the next batch raises.
    """

    def __init__(
        self,
        workflow: Workflow,
        *,
        sampler: Sampler | None = None,
        max_in_flight: int = 4096,
        max_failures: int = 16,
        failure_window: int = 256,
    ) -> None:
        for name, value, least in (
            ("max_in_flight", max_in_flight, 1),
            ("max_failures", max_failures, 0),
            ("failure_window", failure_window, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; expected {least} or more")
        self._workflow, self._sampler = workflow, sampler or BoundedStaleness()
        self._max_in_flight, self._max_failures, self._failure_window = max_in_flight, max_failures, failure_window
        self._version = 0
        self._running: dict[asyncio.Task[None], int] = {}
        """Of each, the version at its start."""
        self._waiting: list[Episode] = []
        self._num_started = self._num_used = self._num_rejected = self._num_evicted = self._num_failed = 0
        self._recent: list[BaseException | None] = []
        self._changed: asyncio.Event = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="helmsman-workflows", daemon=True)
        self._thread.start()
        self._is_closing = self._closed = False

    # --- batches ----------------------------------------------------------------------------------------------------------

    def rollout_batch(self, items: Iterable[Any]) -> list[Any]:
        """Run these episodes, wait for all, and return their values in the order of the items; None for one without a value.

        Raises: the first error of an episode, once all have ended.
        """
        return self._run(self._rollout_batch(list(items)))

    def prepare_batch(self, source: Iterator[Any], batch_size: int) -> list[Episode]:
        """The next ``batch_size`` episodes; meanwhile and afterwards as many more run as the sampler lets.

        Args:
            source: of items; drawn from when an episode starts, also while the script trains.

        When the source ends, the last batch is shorter, and those after it are empty. Raises: WorkflowFailuresError.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
        return self._run(self._prepare_batch(source, batch_size))

    def set_version(self, version: int) -> None:
        """Say which weight version is served from now on; more episodes may start then.

        Raises: ValueError for a version below the last one.
        """

        async def change() -> None:
            if version < self._version:
                raise ValueError(f"weight version {version} after {self._version}; versions only grow")
            self._version = version
            self._changed.set()

        self._run(change())

    def figures(self) -> WorkflowFigures:
        """What has become of the episodes so far."""

        async def read() -> WorkflowFigures:
            return WorkflowFigures(
                num_started=self._num_started,
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                num_used=self._num_used,
                num_rejected=self._num_rejected,
                num_evicted=self._num_evicted,
                num_failed=self._num_failed,
            )

        return self._run(read())

    def close(self) -> None:
        """Cancel what runs, and end the thread. Idempotent."""
        if self._closed:
            return

        async def cancel_all() -> None:
            self._is_closing, self._feeding = True, None
            self._changed.set()
            for task in list(self._running):
                task.cancel()
            if self._running:
                await asyncio.wait(list(self._running), timeout=_STOP_S)

        self._run(cancel_all())
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- inside, all of it on the loop ------------------------------------------------------------------------------------

    _feeding: tuple[Iterator[Any], int] | None = None
    """Where items come from, and the size of a batch."""

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise _closed()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _rollout_batch(self, items: Sequence[Any]) -> list[Any]:
        async def one(item: Any) -> Any:
            return await self._workflow(item)

        tasks = [asyncio.ensure_future(one(item)) for item in items]
        try:
            if tasks:
                await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        return [task.result() for task in tasks]

    async def _prepare_batch(self, source: Iterator[Any], batch_size: int) -> list[Episode]:
        self._feeding = (source, batch_size)
        while True:
            if self._is_closing:
                raise _closed()
            self._changed.clear()
            self._evict(batch_size)
            has_more = self._feed()
            self._require_few_failures()
            batch = list(self._sampler.select(self._waiting, self._pipe(batch_size)))
            if not batch and not has_more and not self._running:
                batch = sorted(self._waiting, key=lambda each: each.number)[:batch_size]  # all that will ever come
                self._take(batch)
                return batch
            if batch:
                self._take(batch)
                self._feed()
                return batch
            await self._changed.wait()

    def _take(self, batch: Sequence[Episode]) -> None:
        taken = {each.number for each in batch}
        self._waiting = [each for each in self._waiting if each.number not in taken]
        self._num_used += len(batch)

    def _pipe(self, batch_size: int) -> Pipe:
        return Pipe(
            version=self._version,
            batch_size=batch_size,
            num_running=len(self._running),
            oldest_running=min(self._running.values(), default=None),
            num_waiting=len(self._waiting),
            num_used=self._num_used,
        )

    def _evict(self, batch_size: int) -> None:
        old = {each.number for each in self._sampler.evict(self._waiting, self._pipe(batch_size))}
        self._waiting = [each for each in self._waiting if each.number not in old]
        self._num_evicted += len(old)

    def _feed(self) -> bool:
        """Start what may be started; whether the source may have more."""
        if self._feeding is None:
            return False
        source, batch_size = self._feeding
        for _ in range(min(self._sampler.admit(self._pipe(batch_size)), self._max_in_flight - len(self._running))):
            try:
                item = next(source)
            except StopIteration:
                self._feeding = None
                return False
            task = asyncio.ensure_future(self._episode(item, self._num_started, self._version))
            self._num_started += 1
            self._running[task] = self._version
            task.add_done_callback(self._ended)
        return True

    async def _episode(self, item: Any, number: int, version: int) -> None:
        try:
            value = await self._workflow(item)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - it is this episode's failure; too many of them are the batch's
            log.warning("an episode failed: %s: %s", type(error).__name__, error)
            self._num_failed += 1
            self._note(error)
            return
        self._note(None)
        episode = Episode(item=item, value=value, number=number, version=version)
        if value is None or not self._sampler.keep(episode):
            self._num_rejected += 1
        else:
            self._waiting.append(episode)

    def _note(self, error: BaseException | None) -> None:
        self._recent = [*self._recent, error][-self._failure_window :]

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._changed.set()
        if self._feeding is not None and len(self._failures()) <= self._max_failures:
            self._evict(self._feeding[1])
            self._feed()  # also while the script trains

    def _failures(self) -> list[BaseException]:
        return [error for error in self._recent if error is not None]

    def _require_few_failures(self) -> None:
        failures = self._failures()
        if len(failures) > self._max_failures:
            self._recent = []
            raise WorkflowFailuresError(
                num_failed=len(failures), limit=self._max_failures, window=self._failure_window, last=failures[-1]
            ) from failures[-1]


def _closed() -> HelmsmanError:
    return HelmsmanError("this WorkflowExecutor is closed; make a new one.")
