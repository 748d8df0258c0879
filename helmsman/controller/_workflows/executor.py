"""WorkflowExecutor: runs a user's async function per episode, many at once, and makes batches of
what comes out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from helmsman.api.closing import Closing
from helmsman.controller._workflows.episode_runner import (
    EpisodeRunner,
    Workflow,
    WorkflowFigures,
    closed_error,
)
from helmsman.controller._workflows.staleness import BatchPolicy, Episode
from helmsman.rpc_server._host.threads import start_loop

T = TypeVar("T")

_STOP_S = 5.0


class WorkflowExecutor(Closing):
    """Runs episodes on an event loop and in a thread of its own, beside the training step.

    An exception in an episode is that episode's failure: it is logged and counted, and another
    episode takes its place, until more than ``max_failures`` of the last ``failure_window``
    episodes have failed.

    Args:
        workflow: an ``async def``; see Workflow. TypeError for a function that is none.
        batch_policy: decides what is started, kept, handed over and stopped; BoundedStaleness(0)
            when None, which is synchronous.
        max_in_flight: episodes that run at once, at most.
        max_failures: failed episodes among the last ``failure_window``, beyond which the next batch
            raises.
        episode_timeout: seconds from an episode's start, after which it is cancelled and has
            failed; None for no limit. The cancellation reaches its awaits: requests of
            ``rollout.async_generate_one`` are aborted at their instances. An episode that
            swallows it continues, and its result is dropped.
    """

    def __init__(
        self,
        workflow: Workflow,
        *,
        batch_policy: BatchPolicy | None = None,
        max_in_flight: int = 4096,
        max_failures: int = 16,
        failure_window: int = 256,
        episode_timeout: float | None = None,
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
        """So that nothing is given to the loop after what ends it, and would never be answered."""
        self._asked: set[concurrent.futures.Future[Any]] = set()
        self._loop, self._thread = start_loop("helmsman-workflows")
        self._closed = False

    def rollout_batch(self, items: Iterable[Any]) -> list[Any]:
        """Run these episodes, wait for all, and return their values in the order of the items; None
        for one without a value.

        Raises: the first error of an episode, in the order of the items, once all have ended;
            EpisodeTimeoutError.
        """
        return self._run(self._episodes.rollout_batch(list(items)))

    def prepare_batch(self, source: Iterator[Any], batch_size: int) -> list[Episode]:
        """The next ``batch_size`` episodes; meanwhile and afterwards as many more run as the
        batch_policy lets.

        Args:
            source: of items; drawn from when an episode starts, also while the script trains. It
                holds up all episodes while it blocks, as the batch policy does.

        When the source ends, the last batch is shorter, which is logged, and those after it are
        empty. Raises: WorkflowFailuresError, or what the source or the batch policy has raised.
        """
        return self._run(self._episodes.prepare_batch(source, batch_size))

    def set_version(self, version: int) -> None:
        """Say which weight version is served from now on; more episodes may start then, at the
        latest with the next batch.

        Raises: ValueError for a version below the last one.
        """
        self._run(_call(self._episodes.set_version, version))

    def figures(self) -> WorkflowFigures:
        """What has become of the episodes so far."""
        return self._run(_call(self._episodes.figures))

    def close(self) -> None:
        """Cancel what runs, and end the thread. Idempotent."""
        self._forbid_blocking()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            asked = list(self._asked)
            ended = asyncio.run_coroutine_threadsafe(self._episodes.close(), self._loop)
        try:
            ended.result()
            concurrent.futures.wait(asked, timeout=_STOP_S)  # they are told that it is closed
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
                "an episode, a source or a batch policy made a blocking call of the "
                "WorkflowExecutor that runs it, which would wait "
                "for itself; make it in the script, or by asyncio.to_thread"
            )


async def _call(function: Callable[..., T], *args: Any) -> T:
    return function(*args)
