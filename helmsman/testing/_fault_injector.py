"""FaultInjector: a fault plan under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from helmsman.api.errors import FaultsUnsupportedError, HelmsmanError
from helmsman.api.faults import Fault, Injection
from helmsman.api.scheduler import Scheduler

log = logging.getLogger(__name__)


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a fault at one worker."""

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


class FaultInjector:
    """Injects the faults of a plan as the script reaches their steps. It never raises for a worker that is missing."""

    def __init__(self, faults: Sequence[Fault], scheduler: Scheduler) -> None:
        """See FaultPlan.begin."""
        if faults and scheduler.shares_process:
            raise FaultsUnsupportedError(scheduler=type(scheduler).__name__)
        self._pending = list(faults)
        self._scheduler = scheduler
        self._has_begun = False
        self.record: list[FaultRecord] = []
        """All records so far, in their order, also of faults that could not be injected."""

    def step(self, step: int) -> list[FaultRecord]:
        """Inject the faults that are due at a step and return their records; call it as each step begins.

        Faults of steps that were skipped since the last call are due now. Those due before the first call are left out, since a
        resumed run has had them. Each fault happens once.
        """
        if not self._pending:
            return []
        with ThreadPoolExecutor(1, "helmsman-faults") as pool:  # the caller's thread may run an event loop
            return pool.submit(asyncio.run, self.astep(step)).result()

    async def astep(self, step: int) -> list[FaultRecord]:
        """Inject the faults that are due at a step, as ``step`` does, from any event loop."""
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
        except HelmsmanError as error:  # a missing worker or a closed scheduler goes into the record and does not end the run
            return [Injection(worker_id=fault.worker_id, pid=None, node="", done=False, outcome=str(error))]
