"""Finds ranks that do not answer, beside the calls that wait for them.

A rank that dies is told by the connection to it. One that is stopped, or whose machine has vanished, is not: its peers wait for
it in a collective, and the script for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Self

from helmsman.api.errors import CallTimeoutError, HelmsmanError, NotFoundError, SchedulerClosedError, WorkerFailedError
from helmsman.controller._aio.event_loop import run_sync
from helmsman.controller._roles.call_all import observe
from helmsman.controller._training.recovery_policy import RecoveryPolicy
from helmsman.controller._training.train_controller import TrainController
from helmsman.controller._transport.health import require_answer

log = logging.getLogger(__name__)


class RankWatch:
    """Asks every rank of a job whether it is there, one question to each at a time, and ends those that are silent.

    Args:
        trainer: the job; its ranks may be built anew meanwhile.
        policy: how often, and for how long a rank may be silent.
    """

    def __init__(self, trainer: TrainController, policy: RecoveryPolicy) -> None:
        self._trainer, self._policy = trainer, policy
        self._worker_ids = [worker.id for worker in trainer.workers]
        self._busy_since: dict[str, float] = {}
        """By worker id, when it was first seen to be busy since its last answer, by time.monotonic()."""
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        async def start() -> None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            observe(self._task, f"the watch over the ranks of {self._trainer.role}")

        run_sync(start())
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            if self._task is not None:
                self._task.cancel()

        run_sync(stop())

    def lost(self) -> dict[str, WorkerFailedError]:
        """Ask all ranks now; those that have ended, or are ended for their silence, and how. At most about ``dead_s``."""

        async def ask_all() -> list[WorkerFailedError | None]:
            return await asyncio.gather(*map(self._ask, self._worker_ids))

        found = zip(self._worker_ids, run_sync(ask_all()), strict=True)
        return {worker_id: error for worker_id, error in found if error is not None}

    async def _run(self) -> None:
        await asyncio.gather(*map(self._keep_asking, self._worker_ids))

    async def _keep_asking(self, worker_id: str) -> None:
        while True:
            await asyncio.sleep(self._policy.probe_every_s)
            await self._ask(worker_id)

    async def _ask(self, worker_id: str) -> WorkerFailedError | None:
        """How a rank has ended; None while it is there."""
        build = self._trainer.num_recoveries
        limit = "dead_s"
        try:
            health = await require_answer(self._trainer.scheduler, worker_id, self._policy.dead_s)
            if not health.is_busy:
                self._busy_since.pop(worker_id, None)
                return None
            busy_s = time.monotonic() - self._busy_since.setdefault(worker_id, time.monotonic())
            if busy_s < max(self._policy.busy_s, self._policy.dead_s):
                return None
            limit = "busy_s"
        except WorkerFailedError as error:
            return error
        except CallTimeoutError as error:
            log.debug("%s: %s", worker_id, error)
        except (NotFoundError, SchedulerClosedError):
            log.debug("%s is not there to be asked", worker_id)
            return None
        except HelmsmanError as error:
            log.debug("%s: a probe failed: %s", worker_id, error)
            return None
        if self._trainer.num_recoveries != build:  # it was another process that was asked
            return None
        return await self._end(worker_id, limit)

    async def _end(self, worker_id: str, limit: str) -> WorkerFailedError | None:
        self._busy_since.pop(worker_id, None)
        limit_s = getattr(self._policy, limit)
        cause = f"was ended because it had not answered for {limit_s:g} s (RecoveryPolicy.{limit})"
        log.warning("%s %s", worker_id, cause)
        try:
            await self._trainer.scheduler.kill_worker(worker_id, cause)
            await self._trainer.scheduler.check_health(worker_id)
        except WorkerFailedError as error:
            return error
        except HelmsmanError as error:
            log.warning("%s could not be ended: %s", worker_id, error)
        return None
