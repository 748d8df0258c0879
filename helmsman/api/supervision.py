"""Supervision of workers: a monitor probes and reports; a budget limits their restarts."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

from helmsman.api.errors import CallTimeoutError, WorkerFailedError
from helmsman.api.suggestions import Suggesting
from helmsman.api.workers import PreemptionNotice, WorkerHealth

log = logging.getLogger(__name__)

_ASK_EVERY_S = 0.25
"""Pause between probes of a worker that does not answer and is not busy."""


class ProbePolicy(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """Probe interval, and the silence after which a worker counts as dead. Times in seconds."""

    probe_every_s: float = 2.0
    """Pause between an answer and the next probe. A worker answers during a call, so a long call
    does not make it silent.
    """
    dead_s: float = 60.0
    """Silence after which a worker is dead, unless it is busy."""
    busy_s: float = 1800.0
    """Silence after which a worker is dead although it computes: C code may hold its interpreter's
    lock. ``dead_s`` applies if it is longer.
    """


class Sign(Enum):
    """A monitor's observation of a worker."""

    ANSWERED = "answered"
    BUSY = "busy"
    """It does not answer but uses CPU. Subscribers get no report until it is DEAD, after
    ``busy_s``.
    """
    SUSPECT = "suspect"
    """It has not answered for ``suspect_s`` seconds."""
    DEAD = "dead"
    """It has exited, or has not answered for ``dead_s`` seconds."""
    PREEMPTED = "preempted"
    """Its node will be preempted. Every probe reports the same notice while it applies."""
    UNKNOWN = "unknown"
    """It could not be probed. Not reported to subscribers."""


class Report(NamedTuple):
    """One observation of a worker."""

    worker_id: str
    sign: Sign
    reason: str = ""
    """Why it is DEAD, as part of a sentence."""
    error: WorkerFailedError | None = None
    """The error that describes its exit; None if it is DEAD because it is silent."""
    health: WorkerHealth | None = None
    """Health of a worker that ANSWERED."""
    notice: PreemptionNotice | None = None
    """Notice of a worker that is PREEMPTED."""


class Monitor:
    """Probes the workers of one scheduler; used on Helmsman's event loop, with its clock.

    Args:
        check_health: The scheduler's ``check_health``.
        look_up_notices: The scheduler's ``preemption_notices``.
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
        """Probe a worker until it answers or is busy; after the limit it is DEAD.

        One more probe follows the limit: this process may itself have been stopped, with an answer
        unread.

        Args:
            worker_id: Id of the worker.
            limit_s: Limit in seconds.
            or_busy: Whether to return when the worker is busy.

        Returns:
            A report with sign ANSWERED, BUSY, DEAD or UNKNOWN.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while True:
            left_s = deadline - loop.time()
            try:
                health = await self._check_health(worker_id, left_s if left_s > 0 else None)
            except CallTimeoutError as error:  # The worker cannot be observed.
                log.debug("%s: %s", worker_id, error)
            except WorkerFailedError as error:
                return Report(worker_id, Sign.DEAD, f"process {error.pid} {error.cause}", error)
            except Exception as error:  # noqa: BLE001 - the worker may just have been removed
                log.debug("%s could not be probed: %s", worker_id, error)
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
            # The look-up is repeated, and a death without notice is detected by the probes.
            except Exception as error:  # noqa: BLE001
                log.debug("preemption notices could not be looked up: %s", error)
            else:
                known = self._notices
                self._notices = {
                    id_: known[id_]
                    if id_ in known and known[id_].reason == notice.reason
                    else notice
                    for id_, notice in found.items()
                }
                for watch in tuple(self._watches):
                    watch._give(self._notices)
            await asyncio.sleep(pause_s)

    def close(self) -> None:
        """End all watches. Idempotent."""
        for watch in tuple(self._watches):
            watch.close()
        if self._looking is not None:
            self._looking.cancel()

    def _add(self, watch: Watch) -> None:
        self._watches.add(watch)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_for_notices())


class Watch:
    """Reports on some workers to a subscriber, on the event loop, until ``close``.

    The subscriber's exceptions are logged.

    Args:
        monitor: The monitor.
        policy: Probe interval, and the limits after which a worker is DEAD.
        subscriber: Receives each report.
        worker_ids: Ids of the workers.
        suspect_s: Seconds without an answer after which a worker is SUSPECT; ``policy.dead_s`` if
            None.
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
        self._is_closed = False
        self._asking: dict[str, asyncio.Task[None]] = {}
        for worker_id in worker_ids:
            self.add(worker_id)
        monitor._add(self)

    def add(self, worker_id: str) -> None:
        """Watch one more worker, or a worker's new process; earlier probes do not count for it."""
        self.discard(worker_id)
        if not self._is_closed:
            self._asking[worker_id] = asyncio.create_task(self._keep_asking(worker_id))

    def discard(self, worker_id: str) -> None:
        """Stop watching a worker. Idempotent."""
        if (task := self._asking.pop(worker_id, None)) is not None:
            task.cancel()

    def close(self) -> None:
        """Stop watching all workers permanently. Idempotent."""
        self._is_closed = True
        for worker_id in tuple(self._asking):
            self.discard(worker_id)
        self._monitor._watches.discard(self)

    def _give(self, notices: Mapping[str, PreemptionNotice]) -> None:
        for worker_id in [id_ for id_ in self._asking if id_ in notices]:
            self._report(Report(worker_id, Sign.PREEMPTED, notice=notices[worker_id]))

    def _report(self, report: Report) -> None:
        try:
            self._subscriber(report)
        except Exception:  # Other subscribers and later probes must continue.
            log.exception(
                "the subscriber failed on the report that %s is %s",
                report.worker_id,
                report.sign.value,
            )

    async def _keep_asking(self, worker_id: str) -> None:
        while True:
            report = await self._ask(worker_id)
            if report.sign is not Sign.UNKNOWN:
                self._report(report)
            await asyncio.sleep(self.policy.probe_every_s)

    async def _ask(self, worker_id: str) -> Report:
        loop, policy, limit = asyncio.get_running_loop(), self.policy, "dead_s"
        given_up_at = loop.time() + max(policy.busy_s, policy.dead_s)
        suspecting = loop.call_later(self._suspect_s, self._report, Report(worker_id, Sign.SUSPECT))
        try:
            while (report := await self._monitor.ask(worker_id, policy.dead_s)).sign is Sign.BUSY:
                if loop.time() >= given_up_at:
                    report, limit = Report(worker_id, Sign.DEAD), "busy_s"
                    break
                await asyncio.sleep(policy.probe_every_s)
        finally:
            suspecting.cancel()
        if report.sign is Sign.DEAD and report.error is None:
            setting = "" if type(policy) is ProbePolicy else f" ({type(policy).__name__}.{limit})"
            return report._replace(
                reason=f"it has not answered for {getattr(policy, limit):g} s{setting}"
            )
        return report


class RestartBudget:
    """Limits restarts within a sliding time window, with exponential pauses.

    Callers pass the time, in seconds of any monotonic clock. The pause before a restart doubles
    with each earlier restart in the window.

    Args:
        max_restarts: Maximum number of restarts within the window.
        window_s: Length of the window in seconds.
        pause_s: Pause before the first restart in seconds.
    """

    def __init__(self, max_restarts: int, window_s: float, pause_s: float = 0.0) -> None:
        self._max_restarts, self._window_s, self._pause_s = max_restarts, window_s, pause_s
        self._begun: list[float] = []

    def num_recent(self, now: float) -> int:
        """Return the number of restarts within the window."""
        self._begun = [at for at in self._begun if at + self._window_s > now]
        return len(self._begun)

    def spend(self, now: float) -> float | None:
        """Begin a restart; returns the seconds to wait before it, or None if none is left."""
        if (num_recent := self.num_recent(now)) >= self._max_restarts:
            return None
        self._begun.append(now)
        return float(self._pause_s * 2**num_recent)

    def free_in_s(self, now: float) -> float:
        """Return the seconds until a restart is available; infinite if there is never one."""
        if self.num_recent(now) < self._max_restarts:
            return 0.0
        return (
            self._begun[-self._max_restarts] + self._window_s - now
            if self._max_restarts
            else math.inf
        )
