"""The workers of a RewardPool: who is free, who waits in which order, and what is started anew. Used on one event loop."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable

from helmsman.api.errors import HelmsmanError, RewardWorkersSpentError

log = logging.getLogger(__name__)

_RESTART_WINDOW_S = 3600.0
_PAUSE_S = 0.1
"""After a restart that failed; doubled with each more."""


class Member:
    """A worker, by the process that it has now."""

    def __init__(self, worker_id: str) -> None:
        self.id = worker_id
        self.process = 0
        """Which of its processes: what is heard of an earlier one is no news."""
        self.last_turn = -1
        self.renew()

    def renew(self) -> None:
        """Serve by the process that is there now."""
        self.process += 1
        self.num_in_flight = 0
        self.serves, self.comes_back = True, False
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when this process is gone."""

    def lose(self, reason: str) -> None:
        """The process is gone, or of no use. Idempotent."""
        self.serves = False
        if not self.lost.done():
            self.lost.set_result(reason)


class RewardWorkers:
    """Gives out places at workers, and starts those anew that are lost.

    Args:
        role: of the workers, for messages.
        worker_ids: of all of them, which serve.
        capacity: scores that each takes at once.
        max_restarts: of all together, within an hour.
        rebuild: starts a worker anew, by id; raises when it cannot.
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
        self._members = [Member(worker_id) for worker_id in worker_ids]
        self._queue: collections.deque[asyncio.Future[Member]] = collections.deque()
        """Of those that wait for a place; some wait no more."""
        self._turns = itertools.count()
        self._restarted_at: list[float] = []
        self._restarts: set[asyncio.Task[None]] = set()
        self._last_reason = ""
        self._closed: HelmsmanError | None = None
        """Why no place is given out any more."""

    # --- places -----------------------------------------------------------------------------------------------------------

    async def acquire(self, *, is_again: bool) -> Member:
        """A place at the worker that has the fewest scores, in the order of asking; who was sent in vain comes first.

        Raises: RewardWorkersSpentError when no worker is left; what close was given.
        """
        if self._closed is not None:
            raise self._closed
        place: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        if is_again:
            self._queue.appendleft(place)
        else:
            self._queue.append(place)
        self._hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:  # it came at the same time
                member = place.result()
                self.give_back(member, member.process)
            raise

    def give_back(self, member: Member, process: int) -> None:
        """A score has ended at that process."""
        if member.process == process:
            member.num_in_flight -= 1
            self._hand_out()

    def _hand_out(self) -> None:
        while self._queue:
            if self._queue[0].done():  # cancelled
                self._queue.popleft()
                continue
            free = [member for member in self._members if member.serves and member.num_in_flight < self._capacity]
            if not free:
                break
            member = min(free, key=lambda each: (each.num_in_flight, each.last_turn))
            member.num_in_flight += 1
            member.last_turn = next(self._turns)
            self._queue.popleft().set_result(member)
        if self._queue and not any(member.serves or member.comes_back for member in self._members):
            self._fail_waiting(
                RewardWorkersSpentError(
                    role=self._role,
                    num_workers=len(self._members),
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

    def lose(self, member: Member, process: int, reason: str) -> None:
        """That process is gone, or of no use: what it has fails, and another is started in its place."""
        if member.process != process or not member.serves:
            return
        log.warning("%s: %s", member.id, reason)
        self._last_reason = reason
        member.comes_back = True
        member.lose(reason)
        task = asyncio.ensure_future(self._restart(member))
        self._restarts.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, member: Member) -> None:
        pause_s = _PAUSE_S
        while self._closed is None and self._may_restart():
            try:
                await self._rebuild(member.id)
            except Exception as error:  # noqa: BLE001 - whatever it is, the worker is not there, and the budget decides
                if self._closed is None:
                    log.warning("%s could not be started anew: %s", member.id, error)
                    self._last_reason = f"it could not be started anew: {error}"
                    await asyncio.sleep(pause_s)
                    pause_s *= 2
            else:
                if self._closed is None:
                    member.renew()
                break
        member.comes_back = False
        self._hand_out()

    def _may_restart(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._restarted_at = [at for at in self._restarted_at if now - at < _RESTART_WINDOW_S]
        if len(self._restarted_at) >= self._max_restarts:
            return False
        self._restarted_at.append(now)
        return True

    # --- end --------------------------------------------------------------------------------------------------------------

    def close(self, error: HelmsmanError) -> None:
        """Fail what waits, and let go of what runs."""
        self._closed = error
        self._fail_waiting(error)
        for member in self._members:
            member.lose(str(error))

    async def settle(self, limit_s: float) -> None:
        """Wait for restarts that were under way when it was closed."""
        if self._restarts:
            await asyncio.wait(list(self._restarts), timeout=limit_s)
