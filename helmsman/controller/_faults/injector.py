"""Drill: a fault plan under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec

from helmsman.api.errors import FaultsUnsupportedError, HelmsmanError
from helmsman.api.faults import Fault, Injection
from helmsman.api.scheduler import Scheduler
from helmsman.controller._aio.event_loop import run_sync

log = logging.getLogger(__name__)


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a fault at one worker."""

    at: float
    """When, in seconds since the epoch."""
    step: int
    """The script's step."""
    fault: Fault
    injection: Injection

    def __str__(self) -> str:
        it = self.injection
        what = it.outcome if it.done else f"nothing done, {it.outcome}"
        where = f" (pid {it.pid} on {it.node})" if it.pid is not None else ""
        return f"{self.fault}: {it.worker_id}{where}: {what}"


class Drill:
    """Inflicts the faults of a plan as the script comes to their steps. It never raises for a worker that is not there."""

    def __init__(self, faults: Sequence[Fault], scheduler: Scheduler) -> None:
        """See FaultPlan.begin."""
        if faults and scheduler.shares_process:
            raise FaultsUnsupportedError(scheduler=type(scheduler).__name__)
        self._pending = list(faults)
        self._scheduler = scheduler
        self._has_begun = False
        self.record: list[FaultRecord] = []
        """What has been inflicted, and what could not be, in its order."""

    def step(self, step: int) -> list[FaultRecord]:
        """Inflict what is due at a step, and return what became of it; to be called as each step begins.

        What is due at steps that were left out since the last call is due now; what was due before the first call is left out,
        since a run that is resumed has had it. Each fault happens once.
        """
        return run_sync(self.astep(step)) if self._pending else []

    async def astep(self, step: int) -> list[FaultRecord]:
        """As step, awaited, from any event loop."""
        first, self._has_begun = not self._has_begun, True
        due = [fault for fault in self._pending if fault.at_step <= step]
        self._pending = [fault for fault in self._pending if fault.at_step > step]
        if first:
            due = [fault for fault in due if fault.at_step == step]
        found = await asyncio.gather(*map(self._inject, due))
        now = time.time()
        new = [
            FaultRecord(at=now, step=step, fault=fault, injection=injection)
            for fault, injections in zip(due, found, strict=True)
            for injection in injections
        ]
        for record in new:
            log.log(logging.INFO if record.injection.done else logging.WARNING, "drill: %s", record)
        self.record += new
        return new

    async def _inject(self, fault: Fault) -> list[Injection]:
        try:
            return await self._scheduler.inject(fault)
        except HelmsmanError as error:  # the worker is not there, or the scheduler is closed: the drill's matter, not the run's
            return [Injection(worker_id=fault.worker_id, pid=None, node="", done=False, outcome=str(error))]
