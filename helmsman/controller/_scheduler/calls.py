"""Engine calls, each sent once, and values kept in workers or in the script's process."""

from __future__ import annotations

import collections
import contextlib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from helmsman._base.event_loop import forbid_blocking, run_async, run_sync
from helmsman._wire.codec import Packed, decode, encode, encode_arguments
from helmsman._wire.messages import Request, Verb
from helmsman._wire.wire import Outgoing
from helmsman.api import errors
from helmsman.api.fan_out import Fanout
from helmsman.api.scheduler import CONTROLLER, Call, ResultHandle, WorkerState
from helmsman.controller._scheduler.argument_types import refusal, require_seconds
from helmsman.controller._scheduler.backend import Backend, Run
from helmsman.controller._scheduler.roles import RoleRegistry
from helmsman.controller._scheduler.transport.client import (
    GroupPendingCall,
    WorkerClient,
    await_reply,
    request_ids,
    wait_for_reply,
)
from helmsman.rpc_server._host.handles import keep

_REMEMBERED = 10_000


class ValueStore:
    """Puts values in the backend's store and tracks which handles have lost their value."""

    def __init__(self, roles: RoleRegistry, backend: Backend) -> None:
        self._roles = roles
        self._backend = backend
        self._put: set[str] = set()
        """Ids of values that the script has put and not released."""
        self._released: dict[str, None] = {}
        """Ids of recently released handles; the stores detect older ones."""

    def put(self, value: Any) -> ResultHandle:
        payload = value.payload if isinstance(value, Packed) else encode(value)
        self.require(payload.handles)
        handle = keep(self._backend.store, CONTROLLER, payload, value)
        self._put.add(handle.id)
        return handle

    def get(self, handle: ResultHandle) -> Any:
        """Fetch the value of a handle.

        Raises:
            HandleLostError: The value is lost.
        """
        self.require([handle])
        return decode(self._backend.store.fetch(handle))

    def release(self, handle: ResultHandle) -> None:
        """Free the value of a handle. Idempotent; blocks."""
        if self._roles.is_closed:  # its value was freed with the scheduler
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
            forbid_blocking()  # before the handle counts as released
        self._released[handle.id] = None
        if len(self._released) > _REMEMBERED:
            del self._released[next(iter(self._released))]
        if client is not None:
            with contextlib.suppress(errors.WorkerFailedError):  # its memory is freed already
                run_sync(client.control(Verb.RELEASE, handle.id))

    def forget_all(self) -> None:
        while self._put:
            self._backend.store.drop(self._put.pop())

    def require(self, handles: Iterable[ResultHandle]) -> None:
        """Raise HandleLostError for a handle whose value is known to be lost.

        On Ray a value may outlive its worker for a while.
        """
        for handle in handles:
            reason = "it was released" if handle.id in self._released else ""
            if handle.worker_id == CONTROLLER:
                if handle.id in self._put:
                    continue
                reason = "it was released, or belongs to another scheduler"
            else:
                try:
                    if self._roles.client(handle.worker_id).state in (
                        WorkerState.FAILED,
                        WorkerState.STOPPED,
                    ):
                        reason = reason or "its worker has ended"
                except errors.WorkerNotFoundError:
                    reason = reason or "its worker was deleted"
            if reason:
                raise errors.HandleLostError(
                    worker_id=handle.worker_id, handle_id=handle.id, reason=reason
                )


class CallService:
    """Creates and calls engines in the workers of a registry; see Scheduler for the arguments."""

    def __init__(self, run: Run, roles: RoleRegistry, values: ValueStore) -> None:
        self._run = run
        self._roles = roles
        self._values = values

    async def create_engine(
        self,
        worker_id: str,
        engine: Any,
        engine_name: str | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        if not (engine_name is None or isinstance(engine_name, str)):
            raise _wrong_name("create_engine", "engine", "constructor's", engine_name)
        client = self._roles.client(worker_id)
        name = str.__str__(engine_name or worker_id)
        payload = encode_arguments(worker_id, name, "__init__", (engine, args, kwargs))
        self._values.require(payload.handles)
        await run_async(client.create_engine(name, payload, self._run.timeouts.create_engine_s))
        self._roles.note_engine(worker_id, name)

    def call(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None,
        call: Call,
        timeout: float | None,
    ) -> Any:
        return decode(
            wait_for_reply(
                *self._prepared("call_engine", worker_id, method, engine_name, call, timeout)
            )
        )

    async def acall(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None,
        call: Call,
        timeout: float | None,
    ) -> Any:
        return decode(
            await await_reply(
                *self._prepared("async_call_engine", worker_id, method, engine_name, call, timeout)
            )
        )

    def _prepared(
        self,
        caller: str,
        worker_id: str,
        method: str,
        engine_name: str | None,
        call: Call,
        timeout: float | None,
    ) -> tuple[WorkerClient, Outgoing, float, str]:
        _require_call(caller, method, engine_name, call.rpc_meta)
        limit_s, source = self._limit(caller, timeout)
        client = self._roles.client(worker_id)
        return client, self._packed(client, worker_id, method, engine_name, call), limit_s, source

    def call_many(
        self,
        calls: Mapping[str, Call],
        method: str,
        engine_name: str | None,
        timeout: float | None,
        *,
        all_or_none: bool,
    ) -> Fanout:
        """Call several workers; see ``Scheduler.call_many``.

        Workers with the same arguments share one message, which is encoded once. Ids of one process
        do not share a message, since its request id would not be unique there.
        """
        fanout = Fanout(*self._limit("call_many", timeout, "timeout"))
        shared: dict[tuple[Any, ...], Outgoing] = {}
        packed: list[tuple[str, WorkerClient, Outgoing]] = []
        num_packed: collections.Counter[WorkerClient] = collections.Counter()
        for worker_id, call in calls.items():
            try:
                _require_call("call_many", method, engine_name, call.rpc_meta)
                client = self._roles.client(worker_id)
                key = (
                    id(call.payload),
                    _name_for(client, engine_name or worker_id),
                    id(call.rpc_meta),
                    num_packed[client],
                )
                outgoing = None if call.payload is None else shared.get(key)
                if outgoing is None:
                    outgoing = shared[key] = self._packed(
                        client, worker_id, method, engine_name, call
                    )
                packed.append((worker_id, client, outgoing))
                num_packed[client] += 1
            # One worker's failure must not hide calls sent to others
            except Exception as error:  # noqa: BLE001
                fanout.failed(worker_id, error)
        if all_or_none and fanout.failures:
            return fanout
        for worker_id, client, outgoing in packed:
            try:
                GroupPendingCall(client, outgoing, fanout, worker_id).begin()
            except Exception as error:  # noqa: BLE001 - such as no memory for the arguments
                fanout.failed(worker_id, error)
        return fanout

    def _limit(
        self, caller: str, timeout: float | None, name: str = "rpc_timeout"
    ) -> tuple[float, str]:
        if timeout is None:
            return self._run.timeouts.call_s, "Timeouts.call_s"
        require_seconds(caller, timeout, name)
        return float(timeout), f"the call's {name} argument"  # locks reject NumPy's numbers

    def _packed(
        self, client: WorkerClient, worker_id: str, method: str, engine_name: str | None, call: Call
    ) -> Outgoing:
        keeps, discards, broadcast, kwargs = False, False, None, call.kwargs
        if call.rpc_meta:
            meta = dict(call.rpc_meta)
            keeps, discards = bool(meta.pop("keep", False)), bool(meta.pop("discard", False))
            broadcast = meta.pop("broadcast", None)
            kwargs = {**kwargs, **meta.pop("kwargs", {})}
            if meta:
                raise TypeError(
                    f"unknown rpc_meta {sorted(map(str, meta))}; it takes 'broadcast', "
                    "'discard', 'keep' and 'kwargs'"
                )
        name = engine_name or worker_id
        payload = call.payload
        if payload is None:
            payload = encode_arguments(worker_id, name, method, (call.args, kwargs))
        if payload.handles:
            self._values.require(payload.handles)
        # Plain str only: msgspec rejects NumPy's subclass.
        plain = None if (engine := _name_for(client, name)) is None else str.__str__(engine)
        request = Request(
            next(request_ids), Verb.CALL, plain, str.__str__(method), keeps, broadcast, discards
        )
        return Outgoing(request, payload)


def _require_call(caller: str, method: object, engine_name: object, rpc_meta: object) -> None:
    """Raise TypeError for an argument of a wrong type.

    The checks are written out because they are part of the cost of an empty call.
    """
    if not isinstance(method, str):
        raise refusal(caller, "method", method, "str, the name of a method of the engine")
    if not (engine_name is None or isinstance(engine_name, str)):
        raise _wrong_name(caller, f'"{method}"', "method's", engine_name)
    if rpc_meta is not None:
        _require_meta(caller, rpc_meta)


def _wrong_name(caller: str, before: str, whose: str, name: object) -> TypeError:
    hint = (
        f"The engine's name, or None for the worker's id, comes before the {whose} arguments: "
        f'{caller}(worker, {before}, "counter", {reprlib.repr(name)})'
    )
    return refusal(caller, "engine_name", name, "str | None", hint)


def _require_meta(caller: str, rpc_meta: object) -> None:
    if not isinstance(rpc_meta, Mapping):
        raise refusal(caller, "rpc_meta", rpc_meta, "Mapping[str, Any] | None")
    for name in ("broadcast", "discard", "keep"):
        if not (rpc_meta.get(name) is None or isinstance(rpc_meta[name], bool)):
            raise refusal(caller, f"rpc_meta[{name!r}]", rpc_meta[name], "bool")
    more = rpc_meta.get("kwargs", {})
    if not (isinstance(more, Mapping) and all(isinstance(name, str) for name in more)):
        raise refusal(caller, "rpc_meta['kwargs']", more, "Mapping[str, Any]")


def _name_for(client: WorkerClient, engine_name: str) -> str | None:
    """Engine name in a request; None for an engine named after its worker.

    Omitting that name lets all workers share one message.
    """
    return None if engine_name == client.worker_id else engine_name
