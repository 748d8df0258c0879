"""Ends ranks that do not answer, beside the calls that wait for them.

The connection to a rank reports its death. A rank that is stopped, or whose machine has vanished, holds up its peers in a
collective, and the script with them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from helmsman.api.errors import HelmsmanError, WorkerFailedError
from helmsman.api.supervision import Report, Sign, Watch
from helmsman.controller._aio.event_loop import run_sync
from helmsman.controller._roles.call_all import observe
from helmsman.controller._training.recovery_policy import RecoveryPolicy
from helmsman.controller._training.train_controller import TrainController

log = logging.getLogger(__name__)


class RankMonitor:
    """Ends the ranks of a job that its scheduler's monitor reports as silent.

    Args:
        trainer: the job; its ranks may be rebuilt meanwhile.
        policy: how often a rank is asked, and for how long it may be silent.
    """

    def __init__(self, trainer: TrainController, policy: RecoveryPolicy) -> None:
        self._trainer, self._policy, self._scheduler = trainer, policy, trainer.scheduler
        self._worker_ids = [worker.id for worker in trainer.workers]
        self._builds = dict.fromkeys(self._worker_ids, trainer.num_recoveries)
        """By worker id, ``num_recoveries`` at its last report: silence that began before a recovery is another process's."""
        self._watch: Watch | None = None

    def __enter__(self) -> Self:
        run_sync(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        run_sync(self._stop())

    async def _start(self) -> None:
        self._watch = Watch(self._scheduler.monitor, self._policy, self._on_report, self._worker_ids)

    async def _stop(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def lost(self) -> list[WorkerFailedError]:
        """Ask all ranks now; how those ended that have ended, or are ended for their silence. At most about ``dead_s``."""

        async def ask(worker_id: str) -> WorkerFailedError | None:
            report = await self._scheduler.monitor.ask(worker_id, self._policy.dead_s)
            is_silent = report.sign is Sign.DEAD and report.error is None
            return await self._end(report) if is_silent else report.error

        async def ask_all() -> list[WorkerFailedError | None]:
            return await asyncio.gather(*map(ask, self._worker_ids))

        return [error for error in run_sync(ask_all()) if error is not None]

    def _on_report(self, report: Report) -> None:
        if report.sign not in (Sign.ANSWERED, Sign.DEAD):
            return
        build, self._builds[report.worker_id] = self._builds[report.worker_id], self._trainer.num_recoveries
        if report.sign is Sign.DEAD and report.error is None and build == self._trainer.num_recoveries:
            observe(asyncio.ensure_future(self._end(report)), f"the end of {report.worker_id}")

    async def _end(self, report: Report) -> WorkerFailedError | None:
        """End a rank that is silent; returns how it has ended."""
        cause = f"was ended because {report.reason}"
        log.warning("%s %s", report.worker_id, cause)
        try:
            await self._scheduler.kill_worker(report.worker_id, cause)
            await self._scheduler.check_health(report.worker_id)
        except WorkerFailedError as error:
            return error
        except HelmsmanError as error:
            log.warning("%s could not be ended: %s", report.worker_id, error)
        return None
