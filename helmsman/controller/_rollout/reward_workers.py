"""RewardWorkers: distributes scoring calls over worker processes and restarts lost processes.

Its methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable

from helmsman.api.errors import HelmsmanError, RewardWorkersSpentError, SchedulerClosedError
from helmsman.api.supervision import Report, RestartBudget, Sign

log = logging.getLogger(__name__)

_RESTART_WINDOW_S = 3600.0
_PAUSE_S = 0.1
"""Pause after a failed restart; doubled with each further failure."""
_MAX_PAUSE_S = 30.0
"""Upper limit of the pause. With longer pauses the hourly budget would never run out, and waiting
scores would never fail.
"""


class RewardProcess:
    """One process of a worker, until it is lost."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.num_in_flight = 0
        self.num_sent = 0
        """Scores that were sent to it and have not ended."""
        self.last_turn = -1
        self.alive: asyncio.Task[Report] | None = None
        """Shared liveness probe while the process has no score in flight."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the process is lost."""


class RewardWorkers:
    """Distributes scoring calls over workers, up to ``capacity`` on each; restarts lost workers.

    ``rebuild`` restarts a worker or raises; ``max_restarts`` limits the restarts of all workers
    together within an hour.
    """

    def __init__(
        self,
        role: str,
        worker_ids: Iterable[str],
        capacity: int,
        max_restarts: int,
        rebuild: Callable[[str], Awaitable[None]],
    ) -> None:
        self._role = role
        self._capacity = capacity
        self._max_restarts = max_restarts
        self._rebuild = rebuild
        self._processes: dict[str, RewardProcess | None] = {
            worker_id: RewardProcess(worker_id) for worker_id in worker_ids
        }
        """Process of each worker; None while it is lost."""
        self._coming_back: set[str] = set()
        self._queue: collections.deque[asyncio.Future[RewardProcess]] = collections.deque()
        """Callers that wait for a place, including cancelled ones."""
        self._turns = itertools.count()
        self._budget = RestartBudget(max_restarts, _RESTART_WINDOW_S)
        self._restarts: set[asyncio.Task[None]] = set()
        self._last_reason = ""
        self._closed: HelmsmanError | None = None
        """Error for new callers once the pool is closed."""

    # --- places -----------------------------------------------------------------------------------

    async def acquire(self, *, is_again: bool) -> RewardProcess:
        """Wait for a place at the worker with the fewest scores, in FIFO order.

        A caller whose previous process was lost before the score was sent (``is_again``) goes
        first. Release the place with give_back.

        Raises:
            RewardWorkersSpentError: If no worker is left.
            HelmsmanError: The error passed to close.
        """
        if self._closed is not None:
            raise self._closed
        place: asyncio.Future[RewardProcess] = asyncio.get_running_loop().create_future()
        if is_again:
            self._queue.appendleft(place)
        else:
            self._queue.append(place)
        self._hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            # The place may have been assigned at the same time.
            if not place.cancelled() and place.exception() is None:
                self.give_back(place.result())
            raise

    def give_back(self, process: RewardProcess) -> None:
        process.num_in_flight -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        processes = [process for process in self._processes.values() if process is not None]
        while self._queue:
            if self._queue[0].done():  # cancelled
                self._queue.popleft()
                continue
            free = [process for process in processes if process.num_in_flight < self._capacity]
            if not free:
                break
            process = min(free, key=lambda each: (each.num_in_flight, each.last_turn))
            process.num_in_flight += 1
            process.last_turn = next(self._turns)
            self._queue.popleft().set_result(process)
        if self._queue and not processes and not self._coming_back:
            self._fail_waiting(
                RewardWorkersSpentError(
                    role=self._role,
                    num_workers=len(self._processes),
                    max_restarts=self._max_restarts,
                    window_s=_RESTART_WINDOW_S,
                    reason=self._last_reason,
                )
            )

    def _fail_waiting(self, error: HelmsmanError) -> None:
        while self._queue:
            if not (place := self._queue.popleft()).done():
                place.set_exception(error)

    # --- losses -----------------------------------------------------------------------------------

    def on_report(self, report: Report) -> None:
        if report.sign is Sign.DEAD and (process := self._processes[report.worker_id]) is not None:
            self.lose(process, report.reason)

    def lose(self, process: RewardProcess, reason: str) -> None:
        """Fail the scores of a dead or hung process and start another one. Idempotent."""
        if process.lost.done():
            return
        worker_id = process.worker_id
        log.warning("%s: %s", worker_id, reason)
        self._last_reason = reason
        self._processes[worker_id] = None
        self._coming_back.add(worker_id)
        process.lost.set_result(reason)
        task = asyncio.ensure_future(self._restart(worker_id))
        self._restarts.add(task)  # The event loop holds tasks only weakly.
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, worker_id: str) -> None:
        pause_s = _PAUSE_S
        while (
            self._closed is None
            and self._budget.spend(asyncio.get_running_loop().time()) is not None
        ):
            try:
                await self._rebuild(worker_id)
            except SchedulerClosedError as error:
                self._last_reason = f"it could not be restarted: {error}"
                break
            # A rebuild may raise any error; the budget decides whether to try again.
            except Exception as error:  # noqa: BLE001
                if self._closed is None:
                    log.warning("%s could not be restarted: %s", worker_id, error)
                    self._last_reason = f"it could not be restarted: {error}"
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:
                self._processes[worker_id] = RewardProcess(worker_id)
                break
        self._coming_back.discard(worker_id)
        self._hand_out()

    # --- end --------------------------------------------------------------------------------------

    def close(self, error: HelmsmanError) -> None:
        self._closed = error
        self._fail_waiting(error)
        for process in self._processes.values():
            if process is not None and not process.lost.done():
                process.lost.set_result(str(error))

    async def settle(self, limit_s: float) -> None:
        """Wait up to ``limit_s`` seconds for restarts that were running at close."""
        if self._restarts:
            await asyncio.wait(list(self._restarts), timeout=limit_s)
