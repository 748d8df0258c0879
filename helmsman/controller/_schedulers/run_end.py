"""Ends a scheduler's run, and shows other processes until then that the run is alive."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref

from helmsman.api.scheduler import Scheduler
from helmsman.controller._aio.event_loop import forbid_blocking, run_sync
from helmsman.controller._node.control_socket import ControlSocket
from helmsman.controller._node.driver_log import script_failure, story
from helmsman.controller._node.run_registry import RunLock
from helmsman.controller._schedulers.backend import Backend, Run
from helmsman.controller._schedulers.calls import ValueStore
from helmsman.controller._schedulers.roles import Role, RoleRegistry, stop_roles
from helmsman.controller._schedulers.run_view import SCRIPT, RunView
from helmsman.controller._schedulers.watchdog import Watchdog
from helmsman.rpc_server._process.pulse import Pulse
from helmsman.rpc_server._process.stack_dump import offer_stacks

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
        view: RunView,
    ) -> None:
        self._run, self._roles, self._values, self._backend = run, roles, values, backend
        self._platform_guard = backend.guard_platform()
        self._record = _open_record(self._run, type(scheduler).__name__)
        self._socket = _open_socket(self._run, view)
        self._pulse = _show_life(self._run)
        if self._record is not None:
            run.upkeep.add(f"its record {self._record.path}", self._record.renew)
        self._watchdog = Watchdog(self._run, self._roles, view)
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
            self._watchdog.stop()
            self._pulse.stop()
            if self._socket is not None:
                self._socket.close()
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


def _show_life(run: Run) -> Pulse:
    """Let ``helmsman why`` observe this process while its interpreter cannot answer."""
    pulse, recorder = Pulse(f"{run.id}/{SCRIPT}"), run.recorder

    def describe() -> bytes:
        recorder.beat()
        return b""

    try:
        run.upkeep.start()
        pulse.start(describe)
        offer_stacks()
    except (OSError, RuntimeError) as error:
        log.warning(
            "run %s: other processes cannot read the script's state or stacks: %s", run.id, error
        )
    return pulse


def _open_socket(run: Run, view: RunView) -> ControlSocket | None:
    """Open the socket by which ``helmsman status`` and ``why`` reach the run."""
    try:
        return ControlSocket(run.id, view.answer)
    except OSError as error:
        log.warning(
            "run %s has no control socket, so helmsman why cannot ask it: %s", run.id, error
        )
        return None


def _open_record(run: Run, scheduler: str) -> RunLock | None:
    """Write the record by which ``helmsman clean`` detects that the run's controller has died."""
    try:
        return RunLock(run.id, scheduler, run.log_dir)
    except OSError as error:
        log.warning("run %s has no record, so helmsman clean will not find it: %s", run.id, error)
        return None
