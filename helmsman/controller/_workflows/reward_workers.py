"""The workers of a RewardPool: who is free, who waits in which order, and what is restarted. Used on one event loop."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable

from helmsman.api.errors import HelmsmanError, RewardWorkersSpentError
from helmsman.api.supervision import Report, RestartBudget, Sign

log = logging.getLogger(__name__)

_RESTART_WINDOW_S = 3600.0
_PAUSE_S = 0.1
"""After a restart that failed; doubled with each more."""
_MAX_PAUSE_S = 30.0
"""Or the budget of an hour would never be spent, and what waits for a worker would never be told."""


class Process:
    """A worker's process, until it is lost."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.num_in_flight = 0
        """Places that were given out."""
        self.num_sent = 0
        """Scores that it has been sent and that have not ended."""
        self.last_turn = -1
        self.alive: asyncio.Task[Report] | None = None
        """The question whether it lives, while it has been sent nothing."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when it is gone."""


class RewardWorkers:
    """Gives out places at workers, and restarts those that are lost.

    Args:
        role: of the workers, for messages.
        worker_ids: of all of them, which serve.
        capacity: scores that each takes at once.
        max_restarts: of all together, within an hour.
        rebuild: restarts a worker, by id; raises when it cannot.
    """

    def __init__(
        self,
        role: str,
        worker_ids: Iterable[str],
        capacity: int,
        max_restarts: int,
        rebuild: Callable[[str], Awaitable[None]],
    ) -> None:
        self._role, self._capacity, self._max_restarts, self._rebuild = role, capacity, max_restarts, rebuild
        self._processes: dict[str, Process | None] = {worker_id: Process(worker_id) for worker_id in worker_ids}
        """By worker; None where it is lost."""
        self._coming_back: set[str] = set()
        self._queue: collections.deque[asyncio.Future[Process]] = collections.deque()
        """Of those that wait for a place; some wait no more."""
        self._turns = itertools.count()
        self._budget = RestartBudget(max_restarts, _RESTART_WINDOW_S)
        self._restarts: set[asyncio.Task[None]] = set()
        self._last_reason = ""
        self._closed: HelmsmanError | None = None
        """Why no place is given out any more."""

    # --- places -----------------------------------------------------------------------------------------------------------

    async def acquire(self, *, is_again: bool) -> Process:
        """A place at the worker that has the fewest scores, in the order of asking; who was sent in vain comes first.

        Raises: RewardWorkersSpentError when no worker is left; what close was given.
        """
        if self._closed is not None:
            raise self._closed
        place: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        if is_again:
            self._queue.appendleft(place)
        else:
            self._queue.append(place)
        self._hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:  # it came at the same time
                self.give_back(place.result())
            raise

    def give_back(self, process: Process) -> None:
        """A place is free again."""
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

    # --- losses -----------------------------------------------------------------------------------------------------------

    def on_report(self, report: Report) -> None:
        """Lose a process that the monitor reports as dead, if the worker has one."""
        if report.sign is Sign.DEAD and (process := self._processes[report.worker_id]) is not None:
            self.lose(process, report.reason)

    def lose(self, process: Process, reason: str) -> None:
        """A process is gone, or of no use: what it has fails, and another is started in its place. Idempotent."""
        if process.lost.done():
            return
        worker_id = process.worker_id
        log.warning("%s: %s", worker_id, reason)
        self._last_reason = reason
        self._processes[worker_id] = None
        self._coming_back.add(worker_id)
        process.lost.set_result(reason)
        task = asyncio.ensure_future(self._restart(worker_id))
        self._restarts.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, worker_id: str) -> None:
        pause_s = _PAUSE_S
        while self._closed is None and self._budget.spend(asyncio.get_running_loop().time()) is not None:
            try:
                await self._rebuild(worker_id)
            except Exception as error:  # noqa: BLE001 - whatever it is, the worker is not there, and the budget decides
                if self._closed is None:
                    log.warning("%s could not be restarted: %s", worker_id, error)
                    self._last_reason = f"it could not be restarted: {error}"
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:
                self._processes[worker_id] = Process(worker_id)
                break
        self._coming_back.discard(worker_id)
        self._hand_out()

    # --- end --------------------------------------------------------------------------------------------------------------

    def close(self, error: HelmsmanError) -> None:
        """Fail what waits, and what runs."""
        self._closed = error
        self._fail_waiting(error)
        for process in self._processes.values():
            if process is not None and not process.lost.done():
                process.lost.set_result(str(error))

    async def settle(self, limit_s: float) -> None:
        """Wait for restarts that were under way when it was closed."""
        if self._restarts:
            await asyncio.wait(list(self._restarts), timeout=limit_s)
