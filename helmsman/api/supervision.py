"""Supervision of workers: a monitor asks and reports, its subscribers decide what follows, within a budget of restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

from helmsman.api.errors import CallTimeoutError, WorkerFailedError
from helmsman.api.suggestions import Suggesting
from helmsman.api.workers import PreemptionNotice, WorkerHealth

log = logging.getLogger(__name__)

_ASK_EVERY_S = 0.25
"""Between two questions to a worker that does not answer and is not busy."""


class ProbePolicy(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """How often a worker is asked whether it lives, and which silence means that it does not. Times in seconds."""

    probe_every_s: float = 2.0
    """Between an answer and the next question. A worker answers beside a running call, so a busy one is not given up."""
    dead_s: float = 60.0
    """A worker that has not answered for so long is dead, unless it is busy."""
    busy_s: float = 1800.0
    """A worker that does not answer but is seen to compute, since C code holds its interpreter's lock, is dead after so long
    without an answer; after ``dead_s`` where that is longer."""


class Sign(Enum):
    """What a monitor has observed of a worker."""

    ANSWERED = "answered"
    BUSY = "busy"
    """It does not answer, and is seen to make progress. Not reported to subscribers, but as DEAD after ``busy_s``."""
    SUSPECT = "suspect"
    """It has not answered for a while."""
    DEAD = "dead"
    """It has died, or has not answered for too long."""
    PREEMPTED = "preempted"
    """It is about to go. Reported again and again, with the same notice, as long as that is so."""
    UNKNOWN = "unknown"
    """It could not be asked. Not reported to subscribers."""


class Report(NamedTuple):
    """An observation of a worker."""

    worker_id: str
    sign: Sign
    reason: str = ""
    """Why it is DEAD, as part of a sentence."""
    error: WorkerFailedError | None = None
    """How it died; None where it is DEAD because it is silent."""
    health: WorkerHealth | None = None
    """Of one that ANSWERED."""
    notice: PreemptionNotice | None = None
    """Of one that is PREEMPTED."""


class Monitor:
    """Watches the workers of one scheduler. It is used on Helmsman's event loop, whose clock it reads.

    Args:
        check_health, look_up_notices: check_health and preemption_notices of the scheduler.
    """

    def __init__(
        self,
        check_health: Callable[[str, float | None], Awaitable[WorkerHealth]],
        look_up_notices: Callable[[], Awaitable[Mapping[str, PreemptionNotice]]],
    ) -> None:
        self._check_health, self._look_up_notices = check_health, look_up_notices
        self._watches: set[Watch] = set()
        self._notices: dict[str, PreemptionNotice] = {}
        self._looking: asyncio.Task[None] | None = None

    async def ask(self, worker_id: str, limit_s: float, *, or_busy: bool = True) -> Report:
        """Ask a worker until it answers, or is seen to be busy.

        Args:
            limit_s: seconds after which it is DEAD. It is asked at least once more when they are over, since this process may
                have been stopped itself, with the answer unread.
            or_busy: whether BUSY ends the questions, too.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while True:
            left_s = deadline - loop.time()
            try:
                health = await self._check_health(worker_id, left_s if left_s > 0 else None)
            except CallTimeoutError as error:  # it cannot be observed
                log.debug("%s: %s", worker_id, error)
            except WorkerFailedError as error:
                return Report(worker_id, Sign.DEAD, f"process {error.pid} {error.cause}", error)
            except Exception as error:  # noqa: BLE001 - nothing is known of the worker, such as one that was just removed
                log.debug("%s could not be asked: %s", worker_id, error)
                return Report(worker_id, Sign.UNKNOWN)
            else:
                if health.answered:
                    return Report(worker_id, Sign.ANSWERED, health=health)
                if or_busy and health.is_busy:
                    return Report(worker_id, Sign.BUSY)
            if left_s <= 0:
                return Report(worker_id, Sign.DEAD, f"it has not answered for {limit_s:g} s")
            await asyncio.sleep(min(_ASK_EVERY_S, max(deadline - loop.time(), 0.0)))

    async def _look_for_notices(self) -> None:
        while self._watches:
            pause_s = min(watch.policy.probe_every_s for watch in self._watches)
            try:
                found = await self._look_up_notices()
            except Exception as error:  # noqa: BLE001 - asked again soon; a worker that goes without notice is noticed, too
                log.debug("which workers are about to go could not be asked: %s", error)
            else:
                known = self._notices
                self._notices = {
                    id_: known[id_] if id_ in known and known[id_].reason == notice.reason else notice
                    for id_, notice in found.items()
                }
                for watch in tuple(self._watches):
                    watch._give(self._notices)
            await asyncio.sleep(pause_s)

    def _add(self, watch: Watch) -> None:
        self._watches.add(watch)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_for_notices())


class Watch:
    """Reports to a subscriber what happens to some workers, until ``close``. Used on the event loop.

    Args:
        monitor: of their scheduler.
        policy: when to ask, and when a worker is DEAD.
        subscriber: called on the event loop.
        worker_ids: those that are watched at once.
        suspect_s: seconds without an answer after which a worker is SUSPECT; ``policy.dead_s`` when None.
    """

    def __init__(
        self,
        monitor: Monitor,
        policy: ProbePolicy,
        subscriber: Callable[[Report], object],
        worker_ids: Iterable[str] = (),
        *,
        suspect_s: float | None = None,
    ) -> None:
        self.policy = policy
        self._monitor, self._subscriber = monitor, subscriber
        self._suspect_s = policy.dead_s if suspect_s is None else suspect_s
        self._asking: dict[str, asyncio.Task[None]] = {}
        for worker_id in worker_ids:
            self.add(worker_id)
        monitor._add(self)

    def add(self, worker_id: str) -> None:
        """Watch one more worker, or another process of a worker: an earlier question says nothing about it."""
        self.discard(worker_id)
        self._asking[worker_id] = asyncio.create_task(self._keep_asking(worker_id))

    def discard(self, worker_id: str) -> None:
        """Watch a worker no more. Idempotent."""
        if (task := self._asking.pop(worker_id, None)) is not None:
            task.cancel()

    def close(self) -> None:
        """Watch none any more. Idempotent."""
        for worker_id in tuple(self._asking):
            self.discard(worker_id)
        self._monitor._watches.discard(self)

    def _give(self, notices: Mapping[str, PreemptionNotice]) -> None:
        for worker_id in [id_ for id_ in self._asking if id_ in notices]:
            self._subscriber(Report(worker_id, Sign.PREEMPTED, notice=notices[worker_id]))

    async def _keep_asking(self, worker_id: str) -> None:
        while True:
            report = await self._ask(worker_id)
            if report.sign is not Sign.UNKNOWN:
                self._subscriber(report)
            await asyncio.sleep(self.policy.probe_every_s)

    async def _ask(self, worker_id: str) -> Report:
        loop, policy, limit = asyncio.get_running_loop(), self.policy, "dead_s"
        given_up_at = loop.time() + max(policy.busy_s, policy.dead_s)
        suspecting = loop.call_later(self._suspect_s, self._subscriber, Report(worker_id, Sign.SUSPECT))
        try:
            while (report := await self._monitor.ask(worker_id, policy.dead_s)).sign is Sign.BUSY:
                if loop.time() >= given_up_at:
                    report, limit = Report(worker_id, Sign.DEAD), "busy_s"
                    break
                await asyncio.sleep(policy.probe_every_s)
        finally:
            suspecting.cancel()
        if report.sign is Sign.DEAD and report.error is None:
            silent = f"it has not answered for {getattr(policy, limit):g} s ({type(policy).__name__}.{limit})"
            return report._replace(reason=silent)
        return report


class RestartBudget:
    """Counts restarts within a window that ends now. The time is given, in seconds on any clock that does not go back.

    Args:
        max_restarts: within ``window_s`` seconds.
        pause_s: seconds before the first one; doubled with each more within the window.
    """

    def __init__(self, max_restarts: int, window_s: float, pause_s: float = 0.0) -> None:
        self._max_restarts, self._window_s, self._pause_s = max_restarts, window_s, pause_s
        self._begun: list[float] = []

    def num_recent(self, now: float) -> int:
        """Restarts within the window."""
        self._begun = [at for at in self._begun if now - at < self._window_s]
        return len(self._begun)

    def spend(self, now: float) -> float | None:
        """Begin one more restart; returns the seconds to wait before it, None when there is none left."""
        if (num_recent := self.num_recent(now)) >= self._max_restarts:
            return None
        self._begun.append(now)
        return float(self._pause_s * 2**num_recent)
