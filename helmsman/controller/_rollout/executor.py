"""WorkflowExecutor: runs an EpisodeRunner in a thread, for scripts that block for batches."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from helmsman._base.loops import start_loop
from helmsman.api.closing import Closing
from helmsman.controller._rollout.episode_runner import (
    EPISODE_TIMEOUT_S,
    EpisodeRunner,
    Workflow,
    WorkflowFigures,
    closed_error,
)
from helmsman.controller._rollout.staleness import BatchPolicy, Episode

T = TypeVar("T")

_STOP_S = 5.0


class WorkflowExecutor(Closing):
    """Runs episodes on an event loop in its own thread, concurrently with training.

    An exception fails only its episode: it is logged and counted, and another episode replaces it.
    If more than ``max_failures`` of the last ``failure_window`` episodes failed, the next batch
    raises.

    Args:
        workflow: An ``async def`` function of one item; see Workflow.
        batch_policy: Decides which episodes are started, kept, batched and stopped;
            BoundedStaleness(0), which is synchronous, when None.
        max_in_flight: Maximum number of concurrent episodes.
        max_failures: Failures tolerated among the last ``failure_window`` episodes.
        failure_window: Number of recent episodes among which failures are counted.
        episode_timeout: Seconds from an episode's start after which it is cancelled and counts as
            failed, 30 minutes by default; None for no limit. The cancellation propagates to its
            awaits: requests of ``rollout.async_generate_one`` are aborted at their instances. An
            episode that suppresses the cancellation continues, and its result is dropped.

    Raises:
        TypeError: If ``workflow`` is not an async function.
        ValueError: If a limit is out of range.
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
        self._episodes = EpisodeRunner(
            workflow,
            batch_policy=batch_policy,
            max_in_flight=max_in_flight,
            max_failures=max_failures,
            failure_window=failure_window,
            episode_timeout=episode_timeout,
        )
        self._lock = threading.Lock()
        """Prevents submissions after close(), which the stopped loop would never complete."""
        self._asked: set[concurrent.futures.Future[Any]] = set()
        self._loop, self._thread = start_loop("helmsman-workflows")
        self._closed = False

    def rollout_batch(self, items: Iterable[Any]) -> list[Any]:
        """Run one episode per item and wait for all of them.

        Returns:
            The values in the order of the items; None for an episode without a value.

        Raises:
            EpisodeTimeoutError: If an episode exceeds ``episode_timeout``.
            HelmsmanError: If the executor is closed.
            Exception: The first error of an episode, in the order of the items, once all have
                ended.
        """
        return self._run(self._episodes.rollout_batch(list(items)))

    def prepare_batch(self, source: Iterator[Any], batch_size: int) -> list[Episode]:
        """Return the next batch of episodes.

        During and after the call, further episodes run as far as the batch policy admits them.

        Args:
            source: Iterator of items. An item is drawn when an episode starts, also during
                training. Neither ``source`` nor the batch policy may block: that stops all
                episodes.
            batch_size: Number of episodes in the batch; 1 or more.

        Returns:
            ``batch_size`` episodes. When the source ends, the last batch is shorter, with a
            warning, and later ones are empty.

        Raises:
            WorkflowFailuresError: If too many recent episodes failed.
            ValueError: If ``batch_size`` is below 1.
            HelmsmanError: If the executor is closed.
            Exception: The error of the source or the batch policy.
        """
        return self._run(self._episodes.prepare_batch(source, batch_size))

    def set_version(self, version: int) -> None:
        """Set the weight version served from now on, which may let further episodes start.

        They start no later than with the next batch.

        Raises:
            ValueError: If ``version`` is below the current one.
        """
        self._run(_call(self._episodes.set_version, version))

    def figures(self) -> WorkflowFigures:
        """Return the numbers of episodes so far, by outcome."""
        return self._run(_call(self._episodes.figures))

    def close(self) -> None:
        """Cancel running episodes and stop the thread. Idempotent."""
        self._forbid_blocking()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            asked = list(self._asked)
            ended = asyncio.run_coroutine_threadsafe(self._episodes.close(), self._loop)
        try:
            ended.result()
            concurrent.futures.wait(asked, timeout=_STOP_S)  # They raise that it is closed.
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            self._forbid_blocking()
        except RuntimeError:
            work.close()
            raise
        with self._lock:
            if self._closed:
                work.close()
                raise closed_error()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._asked.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._asked.discard(future)

    def _forbid_blocking(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "blocking call of a WorkflowExecutor in its own episode, source or batch policy: "
                "it would deadlock. Make the call in the script, or with asyncio.to_thread"
            )


async def _call(function: Callable[..., T], *args: Any) -> T:
    return function(*args)
