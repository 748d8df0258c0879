"""Ends a scheduler's run, and keeps its record until then."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref

from helmsman._base.event_loop import forbid_blocking, run_sync
from helmsman.api.scheduler import Scheduler
from helmsman.controller._scheduler.backend import Backend, Run
from helmsman.controller._scheduler.calls import ValueStore
from helmsman.controller._scheduler.driver_log import script_failure, story
from helmsman.controller._scheduler.roles import Role, RoleRegistry
from helmsman.controller._scheduler.run_registry import RunLock
from helmsman.controller._scheduler.worker_end import stop_roles

log = logging.getLogger(__name__)


class RunEnd:
    """Ends a scheduler's run: on ``close``, at the script's exit, or once it is garbage-collected.

    It references the parts of the scheduler, not the scheduler itself.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        run: Run,
        roles: RoleRegistry,
        values: ValueStore,
        backend: Backend,
    ) -> None:
        self._run, self._roles, self._values, self._backend = run, roles, values, backend
        self._platform_guard = backend.guard_platform()
        self._record = _open_record(self._run, type(scheduler).__name__)
        if self._record is not None:
            run.upkeep.add(f"its record {self._record.path}", self._record.renew)
        self._scheduler = weakref.ref(scheduler)
        atexit.register(self.close)
        weakref.finalize(scheduler, self._dropped).atexit = False

    def close(self) -> None:
        if not self._roles.is_closed:
            forbid_blocking()  # before the roles are marked as closed
        self._backend.closing()
        doomed = self._roles.close()
        if doomed is not None:
            if (error := script_failure()) is not None:
                story.error("run %s ends by %s: %s", self._run.id, type(error).__name__, error)
            atexit.unregister(self.close)
            run_sync(self._close(doomed))

    async def _close(self, doomed: list[Role]) -> None:
        if (scheduler := self._scheduler()) is not None:
            scheduler.monitor.close()
        try:
            await stop_roles(doomed, True, "close", self._run.timeouts.shutdown_s)
        finally:
            self._values.forget_all()
            await self._backend.close()
            self._platform_guard.close()
            if self._record is not None:
                self._record.release()
            self._run.end()

    def _dropped(self) -> None:
        """Close on another thread: garbage is collected on any, whose locks may be held."""
        if not self._roles.is_closed:
            threading.Thread(target=self._close_dropped, name="helmsman-dropped").start()

    def _close_dropped(self) -> None:
        log.warning(
            "run %s: its scheduler was dropped without close(), so its workers end now",
            self._run.id,
        )
        self.close()


def _open_record(run: Run, scheduler: str) -> RunLock | None:
    """Write the record by which ``helmsman clean`` detects that the run's controller has died."""
    try:
        return RunLock(run.id, scheduler, run.log_dir)
    except OSError as error:
        log.warning("run %s has no record, so helmsman clean will not find it: %s", run.id, error)
        return None
