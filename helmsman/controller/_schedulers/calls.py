"""Calls of engines: the caller's thread checks and packs their arguments; each is sent once."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from helmsman.api.fan_out import Fanout
from helmsman.api.scheduler import Call
from helmsman.controller._aio.event_loop import run_async
from helmsman.controller._schedulers.backend import Run
from helmsman.controller._schedulers.role_registry import RoleRegistry
from helmsman.controller._schedulers.values import ValueStore
from helmsman.controller._transport.client import GroupPendingCall, WorkerClient, await_reply, request_ids, wait_for_reply
from helmsman.controller._validation.argument_types import refusal, require_seconds
from helmsman.rpc_server._wire.codec import decode, encode_arguments
from helmsman.rpc_server._wire.messages import Request, Verb
from helmsman.rpc_server._wire.wire import Outgoing


class CallService:
    """Creates and calls engines in the workers of a registry; see Scheduler for the arguments."""

    def __init__(self, run: Run, roles: RoleRegistry, values: ValueStore) -> None:
        self._run = run
        self._roles = roles
        self._values = values

    async def create_engine(
        self, worker_id: str, engine: Any, engine_name: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """As Scheduler.create_engine."""
        client = self._roles.client(worker_id)
        name = str.__str__(engine_name or worker_id)
        payload = encode_arguments(worker_id, name, "__init__", (engine, args, kwargs))
        self._values.require(payload.handles)
        await run_async(client.create_engine(name, payload, self._run.timeouts.create_engine_s))
        self._roles.note_engine(worker_id, name)

    def call(self, worker_id: str, method: str, engine_name: str | None, call: Call, timeout: float | None) -> Any:
        """As Scheduler.call_engine."""
        _require_call("call_engine", worker_id, method, engine_name, call.rpc_meta)
        limit = self._limit("call_engine", timeout)
        client = self._roles.client(worker_id)
        return decode(wait_for_reply(client, self._packed(client, worker_id, method, engine_name, call), *limit))

    async def acall(self, worker_id: str, method: str, engine_name: str | None, call: Call, timeout: float | None) -> Any:
        """As Scheduler.async_call_engine."""
        _require_call("async_call_engine", worker_id, method, engine_name, call.rpc_meta)
        limit = self._limit("async_call_engine", timeout)
        client = self._roles.client(worker_id)
        return decode(await await_reply(client, self._packed(client, worker_id, method, engine_name, call), *limit))

    def call_many(self, calls: Mapping[str, Call], method: str, engine_name: str | None, timeout: float | None) -> Fanout:
        """As Scheduler.call_many. Workers with the same arguments get the same message, which is made once."""
        fanout = Fanout(*self._limit("call_many", timeout))
        shared: dict[tuple[Any, ...], Outgoing] = {}
        for worker_id, call in calls.items():
            try:
                _require_call("call_many", worker_id, method, engine_name, call.rpc_meta)
                client = self._roles.client(worker_id)
                key = (id(call.payload), _name_for(client, engine_name or worker_id), id(call.rpc_meta))
                outgoing = None if call.payload is None else shared.get(key)
                if outgoing is None:
                    outgoing = shared[key] = self._packed(client, worker_id, method, engine_name, call)
                GroupPendingCall(client, outgoing, fanout, worker_id).begin()
            except Exception as error:  # noqa: BLE001 - one worker's failure, which must not hide what was sent to others
                fanout.failed(worker_id, error)
        return fanout

    def _limit(self, caller: str, timeout: float | None) -> tuple[float, str]:
        """Limit of a call in seconds, and its source."""
        if timeout is None:
            return self._run.timeouts.call_s, "Timeouts.call_s"
        require_seconds(caller, timeout)
        return float(timeout), "the call's timeout argument"  # NumPy's own are no numbers to a lock

    def _packed(self, client: WorkerClient, worker_id: str, method: str, engine_name: str | None, call: Call) -> Outgoing:
        meta = dict(call.rpc_meta or {})
        keeps, discards = bool(meta.pop("keep", False)), bool(meta.pop("discard", False))
        broadcast = meta.pop("broadcast", None)
        more = meta.pop("kwargs", {})
        if meta:
            raise TypeError(f"unknown rpc_meta {sorted(map(str, meta))}; it takes 'broadcast', 'discard', 'keep' and 'kwargs'")
        name = engine_name or worker_id
        payload = call.payload
        if payload is None:
            kwargs = {**call.kwargs, **more} if more else call.kwargs
            payload = encode_arguments(worker_id, name, method, (call.args, kwargs))
        if payload.handles:
            self._values.require(payload.handles)
        # What is sent has no subclasses of str: msgspec would refuse NumPy's.
        plain = None if (engine := _name_for(client, name)) is None else str.__str__(engine)
        request = Request(next(request_ids), Verb.CALL, plain, str.__str__(method), keeps, broadcast, discards)
        return Outgoing(request, payload)


def _require_call(caller: str, worker_id: object, method: object, engine_name: object, rpc_meta: object) -> None:
    """Raise TypeError for an argument of a wrong type; by hand, since it is a part of what an empty call costs."""
    if not isinstance(worker_id, str):
        raise refusal(caller, "worker_id", worker_id, "str, as 'role/0'")
    if not isinstance(method, str):
        raise refusal(caller, "method", method, "str, the name of a method of the engine")
    if not (engine_name is None or isinstance(engine_name, str)):
        hint = f'{caller}(worker, "{method}", "counter", {reprlib.repr(engine_name)})'
        hint = f"The engine's name, or None for the worker's id, comes before the method's arguments: {hint}"
        raise refusal(caller, "engine_name", engine_name, "str | None", hint)
    if rpc_meta is not None:
        _require_meta(caller, rpc_meta)


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
    """An engine's name in a request: none for one that bears its worker's, so that all workers can be sent the same."""
    return None if engine_name == client.worker_id else engine_name
