"""What all schedulers share: the way of a call, values that stay where they are, and what is known of the workers."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from helmsman.api import errors
from helmsman.api.environment import EnvironmentVariable
from helmsman.api.faults import Fault, Injection
from helmsman.api.plan import Node
from helmsman.api.scheduler import (
    CONTROLLER,
    EngineSpec,
    Leaving,
    ResultHandle,
    Timeouts,
    WorkerHealth,
    WorkerState,
    WorkerStatus,
)
from helmsman.controller._aio.event_loop import await_all, forbid_blocking, run_async, run_sync
from helmsman.controller._placement.place import Place
from helmsman.controller._placement.snapshot import as_node
from helmsman.controller._schedulers.elastic import ElasticRoles
from helmsman.controller._schedulers.fault_injection import inject
from helmsman.controller._schedulers.rendezvous import probe
from helmsman.controller._transport.client import GroupPendingCall, WorkerClient, await_reply, request_ids, wait_for_reply
from helmsman.controller._transport.fan_out import Fanout
from helmsman.controller._transport.health import ask_health
from helmsman.controller._validation.argument_types import checked, refusal, require_seconds
from helmsman.rpc_server._host.handles import HandleStore, keep
from helmsman.rpc_server._wire.codec import Packed, Payload, decode, encode, encode_arguments
from helmsman.rpc_server._wire.messages import Request, Verb
from helmsman.rpc_server._wire.wire import Outgoing

_REMEMBERED = 10_000


class Call(NamedTuple):
    """The arguments of one worker's call, as one of several."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    rpc_meta: Mapping[str, Any] | None = None
    """As for Scheduler.call_engine; None takes what all are given."""
    payload: Payload | None = None
    """All arguments, packed already, for schedulers that can send them so."""


class SchedulerBase(ElasticRoles):
    """The shared flow of all schedulers; see RoleBook for the arguments and the hooks that a backend fills."""

    def __init__(self, *, seed: int = 0, log_dir: str | Path | None = None, timeouts: Timeouts | None = None) -> None:
        super().__init__(seed=seed, log_dir=log_dir, timeouts=timeouts)
        self._released: dict[str, None] = {}
        """Ids of handles that were released, of late; the stores know of all of them."""
        self._put: set[str] = set()
        """Ids of the values that the script has put and not released."""
        self._store = self._make_store()

    @abc.abstractmethod
    def _make_store(self) -> HandleStore:
        """Where values lie that the script puts."""

    # --- calls ------------------------------------------------------------------------------------------------------

    @checked
    async def set_worker_env(self, worker_id: str, env: Mapping[str, str]) -> None:
        given: Mapping[Any, Any] = env
        wrong = {name: value for name, value in given.items() if not (isinstance(name, str) and isinstance(value, str))}
        if wrong:
            raise TypeError(f"environment of {worker_id}: names and values are strings; got {wrong!r}")
        client = self._client(worker_id)
        await run_async(client.control(Verb.SET_ENV, dict(env)))

    @checked
    async def check_health(self, worker_id: str, timeout: float | None = None) -> WorkerHealth:
        client = self._client(worker_id)
        limit = (self.timeouts.health_s, "Timeouts.health_s") if timeout is None else (timeout, "the operation's deadline")
        found, failures = await run_async(ask_health({worker_id: client}, *limit))
        if worker_id in failures:
            raise failures[worker_id]
        return found[worker_id]

    async def leaving(self) -> dict[str, Leaving]:
        self._require_open("leaving")
        workers = [worker for role in list(self._roles.values()) for worker in role.clients.items()]
        notices = {worker_id: client.leaving for worker_id, client in workers}
        return {worker_id: notice for worker_id, notice in notices.items() if notice is not None}

    @checked
    async def inject(self, fault: Fault) -> list[Injection]:
        if self.shares_process:
            raise errors.FaultsUnsupportedError(scheduler=type(self).__name__)
        target = self._client(fault.worker_id)
        clients = [client for role in list(self._roles.values()) for client in role.clients.values()]
        return await run_async(inject(fault, target, clients, self._why_node_stays))

    def _why_node_stays(self, place: Place) -> str:
        """Why a node cannot be dropped but for the workers there; '' when it can. Blocks for one look at a cluster at most."""
        return "the script runs on it"

    @checked
    async def kill_worker(self, worker_id: str, cause: str) -> None:
        client = self._client(worker_id)
        await run_async(client.kill(cause))

    @checked
    async def probe_rendezvous(self, role: str, address: str, port: int) -> None:
        entry = self._role(role)
        await run_async(probe(role, dict(entry.clients), address, port))

    @checked
    async def create_engine(
        self,
        worker_id: str,
        engine: str | Callable[..., Any] | EngineSpec,
        engine_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        client = self._client(worker_id)
        name = str.__str__(engine_name or worker_id)
        payload = encode_arguments(worker_id, name, "__init__", (engine, args, kwargs))
        self._require_values(payload.handles)
        await run_async(client.create_engine(name, payload, self.timeouts.create_engine_s))
        role = self._roles.get(worker_id.rpartition("/")[0])
        if role is not None:
            role.engine_names.setdefault(worker_id, set()).add(name)

    def call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None = None,
        *args: Any,
        rpc_meta: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        _require_call("call_engine", worker_id, method, engine_name, rpc_meta)
        limit = self._limit("call_engine", timeout)
        client = self._client(worker_id)
        outgoing = self._packed_call(client, worker_id, method, engine_name, args, kwargs, rpc_meta)
        return decode(wait_for_reply(client, outgoing, *limit))

    async def async_call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None = None,
        *args: Any,
        rpc_meta: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        _require_call("async_call_engine", worker_id, method, engine_name, rpc_meta)
        limit = self._limit("async_call_engine", timeout)
        client = self._client(worker_id)
        outgoing = self._packed_call(client, worker_id, method, engine_name, args, kwargs, rpc_meta)
        return decode(await await_reply(client, outgoing, *limit))

    def begin_calls(
        self,
        method: str,
        engine_name: str | None,
        calls: Mapping[str, Call],
        rpc_meta: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> Fanout:
        """Begin a call on each of these workers, on Helmsman's own event loop; all are sent when this returns.

        Those that cannot be begun have failed, and hide nothing of what was sent to others. Workers that get the same get the
        same message, which is made once.
        """
        fanout = Fanout(*self._limit("call_all", timeout))
        shared: dict[tuple[Any, ...], Outgoing] = {}
        for worker_id, call in calls.items():
            meta = rpc_meta if call.rpc_meta is None else call.rpc_meta
            try:
                _require_call("call_all", worker_id, method, engine_name, meta)
                client = self._client(worker_id)
                key = (id(call.payload), _name_for(client, engine_name or worker_id), id(meta))
                outgoing = None if call.payload is None else shared.get(key)
                if outgoing is None:
                    outgoing = self._packed_call(
                        client, worker_id, method, engine_name, call.args, call.kwargs, meta, call.payload
                    )
                    shared[key] = outgoing
                GroupPendingCall(client, outgoing, fanout, worker_id).begin()
            except Exception as error:  # noqa: BLE001 - one worker's failure, which must not hide what was sent to others
                fanout.failed(worker_id, error)
        return fanout

    def _limit(self, caller: str, timeout: float | None) -> tuple[float, str]:
        """Seconds that a call may take, and what says so."""
        if timeout is None:
            return self.timeouts.call_s, "Timeouts.call_s"
        require_seconds(caller, timeout)
        return float(timeout), "the call's timeout argument"  # NumPy's own are no numbers to a lock

    def _packed_call(
        self,
        client: WorkerClient,
        worker_id: str,
        method: str,
        engine_name: str | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rpc_meta: Mapping[str, Any] | None,
        payload: Payload | None = None,
    ) -> Outgoing:
        """A call, packed here, in the caller's thread; ``payload`` is (args, kwargs) where these are packed already."""
        meta = dict(rpc_meta or {})
        keeps, discards = bool(meta.pop("keep", False)), bool(meta.pop("discard", False))
        broadcast = meta.pop("broadcast", None)
        more = meta.pop("kwargs", {})
        if meta:
            raise TypeError(f"unknown rpc_meta {sorted(map(str, meta))}; it takes 'broadcast', 'discard', 'keep' and 'kwargs'")
        name = engine_name or worker_id
        if payload is None:
            payload = encode_arguments(worker_id, name, method, (args, {**kwargs, **more} if more else kwargs))
        if payload.handles:
            self._require_values(payload.handles)
        # What is sent has no subclasses of str: msgspec would refuse NumPy's.
        plain = None if (engine := _name_for(client, name)) is None else str.__str__(engine)
        request = Request(next(request_ids), Verb.CALL, plain, str.__str__(method), keeps, broadcast, discards)
        return Outgoing(request, payload)

    # --- values -----------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> ResultHandle:
        self._require_open("put")
        payload = value.payload if isinstance(value, Packed) else encode(value)
        self._require_values(payload.handles)
        handle = keep(self._store, CONTROLLER, payload, value)
        self._put.add(handle.id)
        return handle

    @checked
    def get(self, handle: ResultHandle) -> Any:
        self._require_open("get")
        self._require_values([handle])
        return decode(self._store.fetch(handle))

    @checked
    def release(self, handle: ResultHandle) -> None:
        if self._closed:  # and with it whoever kept something
            return
        if handle.worker_id == CONTROLLER:
            self._put.discard(handle.id)
            self._store.drop(handle.id)
            return
        try:
            client = self._client(handle.worker_id)
        except (errors.NotFoundError, errors.SchedulerClosedError):
            client = None
        else:
            forbid_blocking()  # before it counts as released
        self._released[handle.id] = None
        if len(self._released) > _REMEMBERED:
            del self._released[next(iter(self._released))]
        if client is None:
            return
        with contextlib.suppress(errors.WorkerFailedError):  # its memory went with it
            run_sync(client.control(Verb.RELEASE, handle.id))

    def _forget_values(self) -> None:
        while self._put:
            self._store.drop(self._put.pop())

    def _require_values(self, handles: Iterable[ResultHandle]) -> None:
        """Raise HandleLostError for a handle whose value is known to be gone. On Ray it may outlive its maker for a while."""
        for handle in handles:
            reason = "it was released" if handle.id in self._released else ""
            if handle.worker_id == CONTROLLER:
                if handle.id not in self._put:
                    raise errors.HandleLostError(
                        worker_id=CONTROLLER, handle_id=handle.id, reason="it was released, or is another scheduler's"
                    )
                continue
            try:
                if self._client(handle.worker_id).state in (WorkerState.FAILED, WorkerState.STOPPED):
                    reason = reason or "its worker has ended"
            except errors.WorkerNotFoundError:
                reason = reason or "its worker was deleted"
            if reason:
                raise errors.HandleLostError(worker_id=handle.worker_id, handle_id=handle.id, reason=reason)

    # --- what is known ----------------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        self._require_open("nodes")
        return [as_node(state) for state in self._snapshot().nodes]

    def status(self) -> list[WorkerStatus]:
        clients = {client.worker_id: client for role in list(self._roles.values()) for client in role.clients.values()}

        async def ask() -> list[WorkerStatus]:
            there = {worker_id: client for worker_id, client in clients.items() if client.is_there}
            found, _ = await ask_health(there, self.timeouts.health_s, "Timeouts.health_s")  # states say what failures mean
            return [client.status(found.get(worker_id)) for worker_id, client in clients.items()]

        return run_sync(ask())

    @checked
    def stacks(self, role: str) -> dict[str, str]:
        self._require_open("stacks")
        entry = self._role(role)

        async def ask(client: WorkerClient) -> str:
            try:
                return str(await client.control(Verb.STACKS))
            except errors.CallError as error:
                return str(error)

        async def ask_all() -> dict[str, str]:
            clients = entry.clients
            return dict(zip(clients, await asyncio.gather(*map(ask, clients.values())), strict=True))

        return run_sync(ask_all())

    @checked
    def environment(self, role: str) -> dict[str, list[EnvironmentVariable]]:
        self._require_open("environment")
        entry = self._role(role)

        async def ask_all() -> dict[str, list[EnvironmentVariable]]:
            clients = entry.clients
            answers = await await_all(client.control(Verb.ENVIRONMENT) for client in clients.values())
            return dict(zip(clients, answers, strict=True))

        return run_sync(ask_all())


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
