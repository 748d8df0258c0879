"""Values that the script puts, and results that stay in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from helmsman.api import errors
from helmsman.api.scheduler import CONTROLLER, ResultHandle, WorkerState
from helmsman.controller._aio.event_loop import forbid_blocking, run_sync
from helmsman.controller._schedulers.backend import Backend
from helmsman.controller._schedulers.role_registry import RoleRegistry
from helmsman.rpc_server._host.handles import keep
from helmsman.rpc_server._wire.codec import Packed, decode, encode
from helmsman.rpc_server._wire.messages import Verb

_REMEMBERED = 10_000


class ValueStore:
    """Puts values in the backend's store, and knows which handles have lost their value."""

    def __init__(self, roles: RoleRegistry, backend: Backend) -> None:
        self._roles = roles
        self._backend = backend
        self._put: set[str] = set()
        """Ids of the values that the script has put and not released."""
        self._released: dict[str, None] = {}
        """Ids of recently released handles; the stores know of all of them."""

    def put(self, value: Any) -> ResultHandle:
        """Keep a value of the script."""
        payload = value.payload if isinstance(value, Packed) else encode(value)
        self.require(payload.handles)
        handle = keep(self._backend.store, CONTROLLER, payload, value)
        self._put.add(handle.id)
        return handle

    def get(self, handle: ResultHandle) -> Any:
        """The value of a handle. Raises HandleLostError."""
        self.require([handle])
        return decode(self._backend.store.fetch(handle))

    def release(self, handle: ResultHandle) -> None:
        """Have the value of a handle forgotten. Idempotent; blocks."""
        if self._roles.is_closed:  # so its value has gone as well
            return
        if handle.worker_id == CONTROLLER:
            self._put.discard(handle.id)
            self._backend.store.drop(handle.id)
            return
        try:
            client = self._roles.client(handle.worker_id)
        except (errors.NotFoundError, errors.SchedulerClosedError):
            client = None
        else:
            forbid_blocking()  # before it counts as released
        self._released[handle.id] = None
        if len(self._released) > _REMEMBERED:
            del self._released[next(iter(self._released))]
        if client is not None:
            with contextlib.suppress(errors.WorkerFailedError):  # its memory went with it
                run_sync(client.control(Verb.RELEASE, handle.id))

    def forget_all(self) -> None:
        """Drop all values that the script has put."""
        while self._put:
            self._backend.store.drop(self._put.pop())

    def require(self, handles: Iterable[ResultHandle]) -> None:
        """Raise HandleLostError for a handle whose value is known to be lost. On Ray it may outlive its maker for a while."""
        for handle in handles:
            reason = "it was released" if handle.id in self._released else ""
            if handle.worker_id == CONTROLLER:
                if handle.id in self._put:
                    continue
                reason = "it was released, or is another scheduler's"
            else:
                try:
                    if self._roles.client(handle.worker_id).state in (WorkerState.FAILED, WorkerState.STOPPED):
                        reason = reason or "its worker has ended"
                except errors.WorkerNotFoundError:
                    reason = reason or "its worker was deleted"
            if reason:
                raise errors.HandleLostError(worker_id=handle.worker_id, handle_id=handle.id, reason=reason)
