"""Scheduler implementation that all backends share."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from helmsman._base.event_loop import await_all, run_async, run_sync
from helmsman._wire.messages import Verb
from helmsman.api import errors
from helmsman.api.environment import EnvironmentVariable, unfit
from helmsman.api.fan_out import Fanout
from helmsman.api.observer import OBSERVER
from helmsman.api.plain import plain
from helmsman.api.plan import Node, Plan, Reservation
from helmsman.api.run_state import RunReporter
from helmsman.api.scheduler import (
    Call,
    EngineSpec,
    Job,
    PreemptionNotice,
    ResultHandle,
    Scheduler,
    SchedulingStrategy,
    Timeouts,
    Worker,
    WorkerHealth,
    WorkerStatus,
    id_of,
    ids_of,
)
from helmsman.controller._placement.resources import as_node
from helmsman.controller._scheduler.argument_types import refusal, require_seconds
from helmsman.controller._scheduler.backend import Backend, Run
from helmsman.controller._scheduler.calls import CallService, ValueStore
from helmsman.controller._scheduler.role_lifecycle import RoleLifecycle
from helmsman.controller._scheduler.roles import RoleRegistry, rank_of
from helmsman.controller._scheduler.run_end import RunEnd
from helmsman.controller._scheduler.transport.client import WorkerClient
from helmsman.controller._scheduler.transport.health import ask_health
from helmsman.controller._scheduler.worker_requests import ask_all, probe

log = logging.getLogger(__name__)

T = TypeVar("T")


class BackendScheduler(Scheduler):
    """A Scheduler whose workers a Backend runs.

    Args:
        backend: Starts the workers; it belongs to this scheduler alone.
        seed: Seed of the run; each worker derives its own from (seed, role, rank).
        log_dir: Folder for one log file per worker. When None: ``helmsman/<host>/<run id>`` in
            XDG_STATE_HOME if it is set, else ``helmsman-<user>/<run id>`` in the temporary folder.
        timeouts: Limits in seconds by class of operation; the defaults of Timeouts when None.

    Raises:
        HelmsmanError: ``backend.open`` failed.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        seed: int = 0,
        log_dir: str | Path | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._run = Run(seed, log_dir, timeouts)
        self._backend = backend
        self._roles = RoleRegistry()
        self._values = ValueStore(self._roles, backend)
        self._calls = CallService(self._run, self._roles, self._values)
        self._lifecycle = RoleLifecycle(self._run, self._roles, backend, self._calls)
        self._end = RunEnd(self, self._run, self._roles, self._values, self._backend)
        self._run.observer = pkgutil.resolve_name(OBSERVER)(
            self._run,
            self._roles,
            type(self).__name__,
            shares_process=backend.shares_process,
            scale=self._lifecycle.scale,
        )
        try:
            backend.open(self._run, self._roles.client)
        except BaseException:
            self.close()
            raise

    @property
    def run_id(self) -> str:
        return self._run.id

    @property
    def log_dir(self) -> Path:
        return self._run.log_dir

    @property
    def reporter(self) -> RunReporter:
        return self._run.observer

    @property
    def timeouts(self) -> Timeouts:
        return self._run.timeouts

    @timeouts.setter
    def timeouts(self, timeouts: Timeouts) -> None:
        self._run.timeouts = timeouts

    def close(self) -> None:
        self._end.close()

    # --- the cluster ------------------------------------------------------------------------------

    @property
    def shares_process(self) -> bool:
        return self._backend.shares_process

    def nodes(self) -> list[Node]:
        self._roles.require_open("nodes")
        return [as_node(state) for state in self._backend.allocator.snapshot().nodes]

    def plan(self, jobs: Job | Collection[Job]) -> Plan:
        valid = _valid("plan", jobs)
        self._roles.require_open("plan")
        return self._backend.allocator.plan(valid, [role.as_planned() for role in self._roles])

    # --- roles ------------------------------------------------------------------------------------

    def create_workers(self, job: Job | Collection[Job]) -> list[str]:
        return self._lifecycle.create(_valid("create_workers", job))

    def fork_workers(self, role: str, target_role: str, command: str | None = None) -> list[str]:
        target = self._roles.open_role(target_role, "fork_workers")
        job = Job(
            role=role,
            replicas=len(target.clients),
            tasks=[
                msgspec.structs.replace(
                    target.job.spec(rank_of(worker_id)), cmd=command, cmd_ready=None, gpu=0
                )
                for worker_id in target.worker_ids
            ],
            scheduling_strategy=SchedulingStrategy(
                type="colocation", target=target_role, fork=True
            ),
        )
        return self._lifecycle.create(_valid("fork_workers", job))

    def reserve(self, job: Job) -> list[Reservation]:
        return self._lifecycle.reserve(*_valid("reserve", job))

    def restart_worker(self, worker_id: str | Worker) -> None:
        self._lifecycle.restart_worker(id_of(worker_id))

    def restart_workers(self, role: str, *, elsewhere: bool = False) -> None:
        self._lifecycle.restart_workers(role, elsewhere=elsewhere)

    def scale(self, role: str, replicas: int) -> list[str]:
        return self._lifecycle.scale(role, replicas)

    def add_workers(self, role: str, count: int) -> list[str]:
        return self._lifecycle.add(role, count)

    def remove_workers(self, role: str, worker_ids: Sequence[str | Worker]) -> None:
        entry = self._roles.open_role(role, "remove_workers")
        run_sync(self._lifecycle.remove(entry, list(dict.fromkeys(ids_of(worker_ids)))))

    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        if role is not None:
            self._roles.open_role(role, "delete_workers")
        self._lifecycle.delete(role, reverse_order)

    def advise(self, role: str, next_step: str) -> None:
        self._lifecycle.advice[role] = next_step

    # --- workers ----------------------------------------------------------------------------------

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        require_seconds("get_workers", timeout)
        clients = self._roles.open_role(role, "get_workers").clients
        limit_s = self.timeouts.health_s if timeout is None else timeout
        if limit_s > 0:
            _ask_all(clients, lambda client: client.control(Verb.HEALTH, limit_s=limit_s))
        return [
            Worker(
                id=worker_id,
                ip=client.node,
                engine_ports=list(client.engine_ports),
                node_id=client.place.node_id,
                devices=list(client.place.devices),
            )
            for worker_id, client in clients.items()
        ]

    def status(self) -> list[WorkerStatus]:
        clients = {client.worker_id: client for client in self._roles.clients()}

        async def ask() -> list[WorkerStatus]:
            there = {worker_id: client for worker_id, client in clients.items() if client.is_there}
            # The failures are ignored: the clients' states reflect them.
            found, _ = await ask_health(there, self.timeouts.health_s, "Timeouts.health_s")
            return [client.status(found.get(worker_id)) for worker_id, client in clients.items()]

        return run_sync(ask())

    def stacks(self, role: str) -> dict[str, str]:
        clients = self._roles.open_role(role, "stacks").clients
        answers = run_sync(ask_all(clients, Verb.STACKS))
        return {worker_id: str(answer) for worker_id, answer in answers.items()}

    def environment(self, role: str) -> dict[str, list[EnvironmentVariable]]:
        clients = self._roles.open_role(role, "environment").clients
        return _ask_all(clients, lambda client: client.control(Verb.ENVIRONMENT))

    async def set_worker_env(self, worker_id: str | Worker, env: Mapping[str, str]) -> None:
        id_ = id_of(worker_id)
        given: dict[Any, Any] = plain(dict(env))
        wrong = {
            name: value
            for name, value in given.items()
            if not (isinstance(name, str) and isinstance(value, str))
        }
        if wrong:
            raise TypeError(f"environment of {id_}: names and values are strings; got {wrong!r}")
        for name, value in given.items():
            if found := unfit(name, value):
                role, field = id_.rpartition("/")[0], f"environment variable {name!r} of {id_}"
                shown, expected = found
                raise errors.InvalidSpecError(
                    role=role, field=field, value=shown, expected=expected
                )
        client = self._roles.client(id_)
        self._backend.require_environment(id_, given)
        await run_async(client.control(Verb.SET_ENV, given))

    async def check_health(
        self, worker_id: str | Worker, timeout: float | None = None
    ) -> WorkerHealth:
        require_seconds("check_health", timeout)
        id_ = id_of(worker_id)
        client = self._roles.client(id_)
        limit = (
            (self.timeouts.health_s, "Timeouts.health_s")
            if timeout is None
            else (timeout, "the operation's deadline")
        )
        found, failures = await run_async(ask_health({id_: client}, *limit))
        if id_ in failures:
            raise failures[id_]
        return found[id_]

    async def preemption_notices(self) -> dict[str, PreemptionNotice]:
        self._roles.require_open("preemption_notices")
        found = {
            worker_id: client.preemption_notice
            for role in self._roles
            for worker_id, client in role.clients.items()
        }
        places = {
            worker_id: place for role in self._roles for worker_id, place in role.places.items()
        }
        told = {worker_id: notice for worker_id, notice in found.items() if notice is not None}
        return told | await self._backend.allocator.preemption_notices(places)

    async def kill_worker(self, worker_id: str | Worker, cause: str) -> None:
        await run_async(self._roles.client(id_of(worker_id)).kill(cause))

    async def probe_rendezvous(self, role: str, address: str, port: int) -> None:
        await run_async(probe(role, dict(self._roles.role(role).clients), address, port))

    # --- engines and values -----------------------------------------------------------------------

    async def create_engine(
        self,
        worker_id: str | Worker,
        engine: str | Callable[..., Any] | EngineSpec,
        engine_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        await self._calls.create_engine(id_of(worker_id), engine, engine_name, args, kwargs)

    def create_engines(
        self,
        worker_ids: Collection[str | Worker],
        engine: str | Callable[..., Any] | EngineSpec,
        engine_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        run_sync(self.async_create_engines(worker_ids, engine, engine_name, *args, **kwargs))

    def call_engine(
        self,
        worker_id: str | Worker,
        method: str,
        engine_name: str | None = None,
        *args: Any,
        rpc_meta: Mapping[str, Any] | None = None,
        rpc_timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        return self._calls.call(
            id_of(worker_id), method, engine_name, Call(args, kwargs, rpc_meta), rpc_timeout
        )

    async def async_call_engine(
        self,
        worker_id: str | Worker,
        method: str,
        engine_name: str | None = None,
        *args: Any,
        rpc_meta: Mapping[str, Any] | None = None,
        rpc_timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        return await self._calls.acall(
            id_of(worker_id), method, engine_name, Call(args, kwargs, rpc_meta), rpc_timeout
        )

    def call_many(
        self,
        calls: Mapping[str, Call],
        method: str,
        engine_name: str | None = None,
        timeout: float | None = None,
        *,
        all_or_none: bool = False,
    ) -> Fanout:
        return self._calls.call_many(calls, method, engine_name, timeout, all_or_none=all_or_none)

    def put(self, value: Any) -> ResultHandle:
        self._roles.require_open("put")
        return self._values.put(value)

    def get(self, handle: ResultHandle) -> Any:
        self._roles.require_open("get")
        return self._values.get(handle)

    def release(self, handle: ResultHandle) -> None:
        self._values.release(handle)


def _valid(method: str, job: Job | Collection[Job]) -> list[Job]:
    jobs = list(job) if isinstance(job, Collection) else [job]
    for index, each in enumerate(jobs):
        if not isinstance(each, Job):
            raise refusal(method, "job", each, "Job | Collection[Job]")
        each.validate()
        if each.role in {other.role for other in jobs[:index]}:
            raise errors.InvalidSpecError(
                role=each.role,
                field="role",
                value=each.role,
                expected="a different role for each job of one start",
            )
    return jobs


def _ask_all(
    clients: Mapping[str, WorkerClient], ask: Callable[[WorkerClient], Coroutine[Any, Any, T]]
) -> dict[str, T]:
    async def ask_all() -> dict[str, T]:
        return dict(zip(clients, await await_all(map(ask, clients.values())), strict=True))

    return run_sync(ask_all())
