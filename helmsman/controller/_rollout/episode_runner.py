"""EpisodeRunner: episodes and their batches on one event loop; the part of WorkflowExecutor.

Time is the loop's clock, so that batch policies can be tested on a virtual clock
(helmsman.testing.run_virtually).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import re
import reprlib
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from helmsman.api.errors import EpisodeTimeoutError, HelmsmanError, WorkflowFailuresError
from helmsman.api.open_work import Ledger
from helmsman.controller._rollout.staleness import (
    BatchPolicy,
    BoundedStaleness,
    Episode,
    ExecutorState,
)

log = logging.getLogger(__name__)

EPISODE_TIMEOUT_S = 1800.0
"""Default of ``episode_timeout``."""
_STOP_S = 5.0
_PACKAGE = str(Path(__file__).parents[2])

Workflow = Callable[[Any], Awaitable[Any]]
"""``async def workflow(item)``: returns the value of one episode, or None to reject the item.

It awaits generation (``rollout.async_generate_one``), tools and rewards. Run blocking work in a
RewardPool or with ``asyncio.to_thread``.
"""


class WorkflowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of episodes so far, except those of rollout_batch.

    ``num_started`` is the sum of the others.
    """

    num_started: int
    num_running: int
    num_waiting: int
    """Completed and kept, but in no batch yet."""
    num_used: int
    """Returned in a batch."""
    num_rejected: int
    """Without a value, or rejected by the batch policy."""
    num_evicted: int
    """Discarded after they completed: too old, or beyond the bound."""
    num_stopped: int
    """Cancelled while running, for the same reasons."""
    num_failed: int
    """Raised an error or timed out."""


class EpisodeRunner:
    """Runs episodes on the event loop of its caller.

    Scripts use WorkflowExecutor, which documents the arguments.
    """

    def __init__(
        self,
        workflow: Workflow,
        *,
        batch_policy: BatchPolicy | None = None,
        max_in_flight: int = 4096,
        max_failures: int = 16,
        failure_window: int = 256,
        episode_timeout: float | None = EPISODE_TIMEOUT_S,
    ) -> None:
        for name, value, least in (
            ("max_in_flight", max_in_flight, 1),
            ("max_failures", max_failures, 0),
            ("failure_window", failure_window, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; expected {least} or more")
        if episode_timeout is not None and not episode_timeout > 0:
            raise ValueError(
                f"episode_timeout is {episode_timeout:g}; expected seconds above 0, or None"
            )
        _require_async(workflow)
        self._workflow, self._batch_policy = workflow, batch_policy or BoundedStaleness()
        self._max_in_flight = max_in_flight
        self._max_failures = max_failures
        self._failure_window = failure_window
        self._timeout_s = episode_timeout
        self._version = 0
        self._feeding: tuple[Iterator[Any], int] | None = None
        """Source of items, and batch size."""
        self._source_error: Exception | None = None
        """Error of the source or the batch policy between two calls of prepare_batch."""
        self._ended_source: Iterator[Any] | None = None
        """Source whose end was already logged."""
        self._handed_at: int | None = None
        """Weight version at which the last batch was returned."""
        self._running: dict[int, int] = {}
        """Number of each running episode -> weight version at its start, in the order of starts."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._given: set[asyncio.Task[Any]] = set()
        name = _name_of(workflow).rpartition("<locals>.")[2]
        self._calls = Ledger[asyncio.Task[Any]]("episode", name)
        """All unfinished calls of the workflow by task, including abandoned ones."""
        self._waiting: list[Episode] = []
        self._num_started = self._num_used = self._num_rejected = 0
        self._num_evicted = self._num_stopped = self._num_failed = 0
        self._recent: list[BaseException | None] = []
        self._changed = asyncio.Event()
        self._num_asking = 0
        """Calls of prepare_batch that wait for ``_changed``; they call ``_turn`` themselves."""
        self._is_closing = False

    async def rollout_batch(self, items: Iterable[Any]) -> list[Any]:
        tasks = [asyncio.ensure_future(self._run(item)) for item in items]
        self._given.update(tasks)

        def ready() -> tuple[int, str]:
            return sum(task.done() for task in tasks), ""

        try:
            if tasks:
                with self._calls.waiting("rollout_batch", len(tasks), ready):
                    await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        finally:
            self._given.difference_update(tasks)
        # Every error is retrieved, so that asyncio logs none.
        errors = [None if task.cancelled() else task.exception() for task in tasks]
        if self._is_closing:
            raise closed_error()
        for error in errors:
            if error is not None:
                raise error
        return [task.result() for task in tasks]

    async def prepare_batch(self, source: Iterator[Any], batch_size: int) -> list[Episode]:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
        self._feeding = (source, batch_size)
        with self._calls.waiting("prepare_batch", batch_size, self._ready):
            return await self._prepare(source, batch_size)

    async def _prepare(self, source: Iterator[Any], batch_size: int) -> list[Episode]:
        while True:
            if self._is_closing:
                raise closed_error()
            self._changed.clear()
            if (error := self._source_error) is not None:
                self._source_error = None
                raise error
            has_more = self._turn(batch_size)
            self._require_few_failures()
            with _no_exit("the batch policy"):
                batch = list(self._batch_policy.select(self._waiting, self._state(batch_size)))
            _require_known(
                "select",
                [each.number for each in batch],
                (each.number for each in self._waiting),
                "wait",
            )
            if not batch and not has_more and not self._running:
                # No further episode can end: return the rest.
                batch = sorted(self._waiting, key=lambda each: each.number)[:batch_size]
                self._take(batch)
                self._warn_of_end(source, len(batch), batch_size)
                return batch
            if batch:
                self._take(batch)
                self._turn(batch_size)
                return batch
            self._num_asking += 1
            try:
                await self._changed.wait()
            finally:
                self._num_asking -= 1

    def _ready(self) -> tuple[int, str]:
        """Return the number of episodes for the next batch, and why no other runs."""
        remark = []
        if not self._running:
            reason = f"{type(self._batch_policy).__name__} admits no more at version "
            reason += f"{self._version}; the last batch was of version {self._handed_at}"
            remark.append("the source has ended" if self._feeding is None else reason)
        if failures := self._failures():
            shown = f"{type(failures[-1]).__name__}: {failures[-1]}"[:160]
            remark.append(f"{len(failures)} of the last {len(self._recent)} failed, {shown}")
        return len(self._waiting), "; ".join(remark)

    def _warn_of_end(self, source: Iterator[Any], num_episodes: int, batch_size: int) -> None:
        if num_episodes < batch_size and source is not self._ended_source:
            self._ended_source = source
            log.warning(
                "the source of items has ended: this batch has %d of %d episodes, and later ones "
                "are empty. End the loop at an "
                "empty batch, or give an endless source, such as itertools.cycle(items)",
                num_episodes,
                batch_size,
            )

    def set_version(self, version: int) -> None:
        if version < self._version:
            raise ValueError(f"version is {version}; expected {self._version} or more")
        self._version = version
        self._changed.set()

    def figures(self) -> WorkflowFigures:
        return WorkflowFigures(
            num_started=self._num_started,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_used=self._num_used,
            num_rejected=self._num_rejected,
            num_evicted=self._num_evicted,
            num_stopped=self._num_stopped,
            num_failed=self._num_failed,
        )

    async def close(self) -> None:
        """Cancel running episodes and wait up to ``_STOP_S`` seconds for them. Idempotent."""
        self._is_closing, self._feeding = True, None
        self._changed.set()
        for task in [*self._tasks.values(), *self._given, *self._calls]:
            task.cancel()
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=_STOP_S)

    # --- flow -------------------------------------------------------------------------------------

    def _turn(self, batch_size: int) -> bool:
        """Apply the batch policy: stop, evict and start episodes.

        Returns:
            Whether the source may have more items.
        """
        with _no_exit("the batch policy"):
            stopped = list(self._batch_policy.stop(self._waiting, self._state(batch_size)))
            old = {
                each.number
                for each in self._batch_policy.evict(self._waiting, self._state(batch_size))
            }
        _require_known("stop", stopped, self._running, "run")
        _require_known("evict", old, (each.number for each in self._waiting), "wait")
        for number in stopped:
            self._leave(number).cancel()
        self._num_stopped += len(stopped)
        if old:
            self._waiting = [each for each in self._waiting if each.number not in old]
            self._num_evicted += len(old)
        return self._feed()

    def _state(self, batch_size: int) -> ExecutorState:
        return ExecutorState(
            version=self._version,
            batch_size=batch_size,
            has_batch=self._handed_at == self._version,
            running=MappingProxyType(self._running),
            num_waiting=len(self._waiting),
            num_used=self._num_used,
        )

    def _take(self, batch: Sequence[Episode]) -> None:
        taken = {each.number for each in batch}
        self._waiting = [each for each in self._waiting if each.number not in taken]
        self._num_used += len(batch)
        self._handed_at = self._version

    def _feed(self) -> bool:
        if self._feeding is None:
            return False
        source, batch_size = self._feeding
        with _no_exit("the batch policy"):
            num_admitted = self._batch_policy.admit(self._state(batch_size))
        for _ in range(min(num_admitted, self._max_in_flight - len(self._running))):
            try:
                with _no_exit("the source of items"):
                    item = next(source)
            except StopIteration:
                self._feeding = None
                return False
            number, self._num_started = self._num_started, self._num_started + 1
            self._running[number] = self._version
            self._tasks[number] = asyncio.ensure_future(self._episode(item, number, self._version))
        return True

    def _leave(self, number: int) -> asyncio.Task[None]:
        """Remove a running episode from the count, and return its task."""
        del self._running[number]
        return self._tasks.pop(number)

    # --- episodes ---------------------------------------------------------------------------------

    async def _run(self, item: Any, number: int | None = None) -> Any:
        """Return the value of the workflow for an item.

        On cancellation or time-out this returns at once, even if the workflow suppresses its own
        cancellation.
        """
        work = asyncio.ensure_future(self._work(item))
        self._calls.begin(work, item, work, number)
        work.add_done_callback(self._calls.end)
        try:
            await asyncio.wait([work], timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._abandon(work)
            raise
        if not work.done():
            self._abandon(work)
            raise EpisodeTimeoutError(item=reprlib.repr(item)[:120], limit_s=self._timeout_s or 0.0)
        if work.cancelled():
            raise HelmsmanError(
                "the episode failed: an operation that it awaited was cancelled, not the episode."
            )
        return work.result()

    async def _work(self, item: Any) -> Any:
        with _no_exit("the episode"):
            made: Any = self._workflow(item)
            if not inspect.isawaitable(made):
                raise TypeError(
                    f"the workflow {_name_of(self._workflow)} returned {made!r:.80}; {_WRITE_ASYNC}"
                )
            return await made

    def _abandon(self, work: asyncio.Future[Any]) -> None:
        work.cancel()
        # Retrieved, so that asyncio does not log it.
        work.add_done_callback(lambda work: work.cancelled() or work.exception())

    async def _episode(self, item: Any, number: int, version: int) -> None:
        try:
            value = await self._run(item, number)
            episode = Episode(item=item, value=value, number=number, version=version)
            with _no_exit("the batch policy"):
                is_of_use = value is not None and self._batch_policy.keep(episode)
        # Any error fails this episode only; too many of them fail the next batch.
        except Exception as error:  # noqa: BLE001
            log.warning(
                "an episode failed (%s): %s: %s", _place_of(error), type(error).__name__, error
            )
            self._num_failed += 1
            self._note(error)
        else:
            self._note(None)
            if is_of_use:
                self._waiting.append(episode)
            else:
                self._num_rejected += 1
        self._leave(number)
        self._changed.set()
        if (
            self._feeding is not None
            and not self._num_asking
            and len(self._failures()) <= self._max_failures
        ):
            try:
                self._turn(self._feeding[1])  # Start replacements also while the script trains.
            # An error of the source or the batch policy; the next prepare_batch raises it.
            except Exception as error:  # noqa: BLE001
                self._feeding, self._source_error = None, error

    def _note(self, error: BaseException | None) -> None:
        self._recent = [*self._recent, error][-self._failure_window :]

    def _failures(self) -> list[BaseException]:
        return [error for error in self._recent if error is not None]

    def _require_few_failures(self) -> None:
        failures = self._failures()
        if len(failures) > self._max_failures:
            self._recent = []
            raise WorkflowFailuresError(
                num_failed=len(failures),
                limit=self._max_failures,
                window=self._failure_window,
                last=f"{type(failures[-1]).__name__}: {failures[-1]}",
            ) from failures[-1]


_AWAITABLE = re.compile("Any|Awaitable|Coroutine|Future|Task")
_WRITE_ASYNC = "expected a coroutine. Define it with `async def`, and await its asynchronous calls"


def _require_async(workflow: Workflow) -> None:
    """Raise TypeError for a function that cannot return a coroutine.

    A lambda, a decorated function or one with an awaitable return annotation passes; its first call
    shows whether it returns a coroutine.
    """
    function: Any = workflow
    while isinstance(function, functools.partial):
        function = function.func
    if callable(function) and not (inspect.isroutine(function) or isinstance(function, type)):
        function = type(function).__call__
    is_plain = inspect.isfunction(function) or inspect.ismethod(function)
    if inspect.iscoroutinefunction(function) or (callable(function) and not is_plain):
        return
    returned = str(getattr(function, "__annotations__", {}).get("return", ""))
    may_be_async = hasattr(function, "__wrapped__") or _AWAITABLE.search(returned) is not None
    may_be_async = may_be_async or getattr(function, "__name__", "") == "<lambda>"
    if (
        not may_be_async
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise TypeError(
            f"the workflow {_name_of(workflow)} is not an async function; {_WRITE_ASYNC}"
        )


def _name_of(workflow: object) -> str:
    return getattr(workflow, "__qualname__", None) or repr(workflow)


def _place_of(error: BaseException) -> str:
    """Return file and line of the innermost frame outside Helmsman, or else of the innermost."""
    cause = error.__cause__
    if cause is not None and not isinstance(cause, Exception):
        error = cause  # _no_exit has replaced it
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)] or frames
    return (
        f"{theirs[-1].filename}:{theirs[-1].lineno} in {theirs[-1].name}"
        if theirs
        else "no traceback"
    )


@contextlib.contextmanager
def _no_exit(whose: str) -> Iterator[None]:
    """Turn SystemExit and other errors of user code that are no Exception into a HelmsmanError.

    The code runs outside the script's thread, so they cannot end the script. They would end the
    task that counts the episode, or the event loop.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise HelmsmanError(
            f"{whose} raised {error!r}, which cannot end the script from another thread; raise an "
            "Exception instead."
        ).with_traceback(error.__traceback__) from error


def _require_known(what: str, chosen: Collection[int], known: Iterable[int], state: str) -> None:
    """Reject unknown and repeated episodes, which would be used or counted twice."""
    if not chosen:
        return
    there, distinct = set(known), set(chosen)
    if len(distinct) < len(chosen) or not distinct <= there:
        raise ValueError(
            f"the batch policy's {what} returned episodes {sorted(chosen)}; expected each once, "
            f"and only those that {state}: {sorted(there)}"
        )


def closed_error() -> HelmsmanError:
    return HelmsmanError("this WorkflowExecutor is closed; make a new one.")
