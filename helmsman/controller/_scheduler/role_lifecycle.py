"""Atomic starts of roles, and restarts, growth and removal of running ones.

Either all jobs of a start are ready and published, or nothing of them remains. A restarted worker
keeps its id; no id is assigned twice. ``worker_end.stop_roles`` ends workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from helmsman._base.event_loop import Deadline, await_all, forbid_blocking, run_sync
from helmsman._wire.messages import Verb, WorkerConfig
from helmsman.api import errors
from helmsman.api.plan import Reservation
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.placement import Placement, targets_first, tile
from helmsman.controller._scheduler.argument_types import require_integer
from helmsman.controller._scheduler.backend import Backend, Launch, Run
from helmsman.controller._scheduler.calls import CallService
from helmsman.controller._scheduler.driver_log import listed, story
from helmsman.controller._scheduler.environment import worker_environment
from helmsman.controller._scheduler.roles import (
    Role,
    RoleRegistry,
    by_id,
    not_found,
    rank_of,
)
from helmsman.controller._scheduler.transport.client import WorkerClient
from helmsman.controller._scheduler.worker_end import stop_roles

_COMMAND_ENGINE = "helmsman._process.command.CommandEngine"


class RoleLifecycle:
    """Starts, changes and ends the roles of a registry; see Scheduler for the arguments."""

    def __init__(self, run: Run, roles: RoleRegistry, backend: Backend, calls: CallService) -> None:
        self.advice: dict[str, str] = {}
        """Role -> next step that its controller suggests after the death of a worker."""
        self._run = run
        self._roles = roles
        self._backend = backend
        self._calls = calls

    def create(self, jobs: Sequence[Job]) -> list[str]:
        roles = self._publish(jobs, "create_workers", lambda: self._start_roles(jobs))
        try:
            run_sync(
                self._run_commands(
                    roles, [worker_id for role in roles for worker_id in role.worker_ids]
                )
            )
        except BaseException:
            for role in reversed(roles):
                with contextlib.suppress(errors.RoleNotFoundError):  # deleted with its target
                    self.delete(role.name)
            raise
        return [worker_id for role in roles for worker_id in role.worker_ids]

    def reserve(self, job: Job) -> list[Reservation]:
        if job.scheduling_strategy.type != "separation":
            raise errors.InvalidSpecError(
                role=job.role,
                field="scheduling_strategy",
                value=job.scheduling_strategy,
                expected="separation, since a colocated job holds no resources of its own",
            )

        async def hold() -> list[Role]:
            async with contextlib.AsyncExitStack() as resources:
                places = await self._backend.allocator.hold(
                    job, Deadline(self._run.timeouts.start_s), resources
                )
                return [Role(job, {}, resources.pop_all(), reserved=by_id(job, places))]

        (role,) = self._publish([job], "reserve", hold)
        return [place.as_reservation() for place in role.places.values()]

    def delete(self, name: str | None, reverse_order: bool = False) -> None:
        forbid_blocking()  # before the roles are removed from the registry
        doomed = self._roles.forget(name)
        if doomed:
            story.info("deleting %s", listed([role.name for role in doomed]))
        run_sync(
            stop_roles(
                doomed,
                reverse_order,
                "delete_workers",
                self._run.timeouts.shutdown_s,
            )
        )

    def _publish(
        self,
        jobs: Sequence[Job],
        operation: str,
        start: Callable[[], Coroutine[Any, Any, list[Role]]],
    ) -> list[Role]:
        self._run.begin(type(self._backend).__name__)
        begun, names = time.monotonic(), listed([job.role for job in jobs])
        with self._roles.claim(jobs, operation), self._run.observer.operation(operation, names):
            try:
                roles = run_sync(start())
            except BaseException as error:
                reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
                story.info("%s of %s failed: %s", operation, names, reason)
                raise
            try:
                self._roles.publish(roles, operation)
            except errors.HelmsmanError:
                run_sync(stop_roles(roles[::-1], False, operation, self._run.timeouts.shutdown_s))
                raise
        took_s = time.monotonic() - begun
        for role in roles:
            workers = _described(role.clients.values())
            story.info("%s of %s took %.1f s: %s", operation, role.name, took_s, workers)
        return roles

    async def _start_roles(self, jobs: Sequence[Job]) -> list[Role]:
        deadline = Deadline(self._run.timeouts.start_s)
        colocated = targets_first(jobs, [role.name for role in self._roles])
        started: dict[str, Role] = {}

        async def start(job: Job, places: Sequence[Placement]) -> None:
            clients = await self._launch(Launch(job, dict(enumerate(places)), deadline, undo))
            started[job.role] = Role(job, by_id(job, clients), stacks[job.role])

        async with (
            contextlib.AsyncExitStack() as resources,
            contextlib.AsyncExitStack() as undo,
        ):
            stacks = {
                job.role: await resources.enter_async_context(contextlib.AsyncExitStack())
                for job in jobs
            }
            separate = [job for job in jobs if job.scheduling_strategy.type == "separation"]
            places: Mapping[str, Sequence[Placement]] = {}
            if separate:
                names = listed([job.role for job in separate])
                holders = functools.partial(self._backend.allocator.why_pending, separate)
                with self._run.observer.operation("placement", names, holders):
                    places = await self._backend.allocator.reserve(separate, deadline, stacks)
            await await_all(start(job, places[job.role]) for job in separate)
            for job in colocated:
                target = started.get(str(job.scheduling_strategy.target)) or self._roles.role(
                    str(job.scheduling_strategy.target)
                )
                shares = tile(job, target.workers)
                if job.scheduling_strategy.fork:
                    targets = list(target.places.values())
                    await start(job, [Placement.beside(share, targets) for share in shares])
                else:
                    owners = list(target.clients.values())
                    clients = by_id(job, [owners[ranks[0]] for ranks, _ in shares])
                    started[job.role] = Role(job, clients, stacks[job.role], reuses=True)
            for role in started.values():
                role.resources = stacks[role.name].pop_all()
            undo.pop_all()
        return [started[job.role] for job in jobs]

    async def _launch(self, start: Launch) -> list[WorkerClient]:
        clients = await self._backend.launch(start)
        await await_all(
            self._prepare(start, *pair) for pair in zip(start.places, clients, strict=True)
        )
        return clients

    async def _prepare(self, start: Launch, rank: int, client: WorkerClient) -> None:
        """Configure a new worker and lease its ports, before it is published."""
        job = start.job
        client.advice = self.advice
        client.observer_of = functools.cache(
            functools.partial(self._run.observer.calls_of, job.role, client.worker_id)
        )
        spec = job.spec(rank)
        limit_s = max(start.deadline.remaining_s, 0.001)
        try:
            if not self._backend.shares_process:
                same_machine = self._backend.same_machine
                config = WorkerConfig(
                    role=job.role,
                    rank=rank,
                    seed=self._run.seed,
                    environment=worker_environment(
                        os.environ, spec, client.environment, same_machine=same_machine
                    ),
                    grant=client.place.grant(client.worker_id),
                )
                await client.control(Verb.CONFIGURE, config, limit_s=limit_s)
            if num_ports := spec.port_count or (1 if spec.cmd else 0):
                ports = await client.control(Verb.LEASE_PORTS, num_ports, limit_s=limit_s)
                client.engine_ports = [str(port) for port in ports]
        except errors.CallError as error:
            raise errors.WorkerStartError(
                role=job.role,
                worker_id=client.worker_id,
                node=client.node,
                reason=str(error).split("\n", 1)[0],
                log_path=client.log_path,
                log_tail=error.log_tail if isinstance(error, errors.WorkerFailedError) else "",
            ) from error

    async def _run_commands(self, roles: Sequence[Role], worker_ids: Sequence[str]) -> None:
        """Run the command of each worker whose spec has one, as a child of the worker."""
        jobs = {role.name: role.job for role in roles}
        limit_s = 0.9 * self._run.timeouts.create_engine_s  # the rest is for the engine's error

        async def run(worker_id: str, spec: SchedulingSpec) -> None:
            client = self._roles.client(worker_id)
            command = (spec.cmd or "").replace("{index}", str(rank_of(worker_id)))
            args = (command, client.engine_ports, spec.cmd_ready, client.node, limit_s)
            await self._calls.create_engine(worker_id, _COMMAND_ENGINE, "command", args, {})

        specs = {each: jobs[each.rpartition("/")[0]].spec(rank_of(each)) for each in worker_ids}
        await await_all(run(worker_id, spec) for worker_id, spec in specs.items() if spec.cmd)

    # --- restarts ---------------------------------------------------------------------------------

    def restart_worker(self, worker_id: str) -> None:
        self._roles.client(worker_id)
        role = self._roles.role(worker_id.rpartition("/")[0])
        if role.reuses:
            raise errors.InvalidSpecError(
                role=role.name,
                field="worker_id",
                value=worker_id,
                expected=f"a worker of {role.target!r}, to which it belongs",
            )
        run_sync(self._restart(role, worker_id))
        run_sync(self._run_commands([role], [worker_id]))

    def restart_workers(self, name: str, *, elsewhere: bool) -> None:
        role = self._roles.open_role(name, "restart_workers")
        users = [
            each.name for each in self._roles if each.target == name and (elsewhere or each.reuses)
        ]
        expected = ""
        if role.reuses or not role.clients:
            expected = (
                "a role with workers of its own; this one "
                f"{f'uses those of role {role.target!r}' if role.target else 'only holds devices'}"
            )
        elif users:
            expected = (
                f"a role whose workers no other role uses; {', '.join(users)} would end with them"
            )
        if expected:
            raise errors.InvalidSpecError(role=name, field="role", value=name, expected=expected)
        if elsewhere:
            # The role may have been scaled since its job was started.
            ranks = [rank_of(worker_id) for worker_id in role.clients]
            specs = (
                [role.job.spec(rank) for rank in ranks]
                if len(role.job.tasks) > 1
                else role.job.tasks
            )
            run_sync(_kill_all(role))
            self.delete(name)
            self.create([msgspec.structs.replace(role.job, replicas=len(ranks), tasks=specs)])
            return
        run_sync(self._restart_all(role))
        run_sync(self._run_commands([role], role.worker_ids))

    async def _restart(self, role: Role, worker_id: str) -> None:
        async with (
            _restarting(role, [worker_id]),
            contextlib.AsyncExitStack() as resources,
            contextlib.AsyncExitStack() as undo,
        ):
            rank, old = rank_of(worker_id), role.clients.get(worker_id)
            if old is None:
                raise not_found(worker_id, role)
            deadline = Deadline(self._run.timeouts.start_s)
            await old.kill("was ended by restart_worker")
            place, allocator = old.place, self._backend.allocator
            if await allocator.is_lost(place):
                await allocator.give_back(
                    worker_id,
                    place,
                    [each.place for each in role.clients.values() if each is not old],
                )
                single = _single(role.job, rank)
                (place,) = (await allocator.reserve([single], deadline, {single.role: resources}))[
                    single.role
                ]
            (client,) = await self._launch(Launch(role.job, {rank: place}, deadline, undo))
            with self._roles.changing(role):
                if role.clients.get(worker_id) is not old:
                    raise not_found(worker_id, role)
                for entry in self._roles:  # including roles that reuse it
                    for each in [each for each, reached in entry.clients.items() if reached is old]:
                        entry.clients = {**entry.clients, each: client}
                        entry.engine_names.pop(each, None)
                if place is not old.place:
                    role.own(worker_id, resources)
                undo.pop_all()
                role.num_restarts[worker_id] += 1
        story.info("restarted %s", _described([client]))

    async def _restart_all(self, role: Role) -> None:
        async with (
            role.growing,
            _restarting(role, role.worker_ids),
            contextlib.AsyncExitStack() as undo,
        ):
            deadline = Deadline(self._run.timeouts.start_s)
            old = role.clients
            await _kill_all(role)
            places = {rank_of(worker_id): client.place for worker_id, client in old.items()}
            clients = await self._launch(Launch(role.job, places, deadline, undo))
            with self._roles.changing(role):
                if role.clients is not old:
                    raise not_found(next(each for each in old if each not in role.clients), role)
                role.clients = dict(zip(old, clients, strict=True))
                role.engine_names.clear()
                role.num_restarts.update(list(role.clients))
                undo.pop_all()
        story.info("restarted role %s: %s", role.name, _described(clients))

    # --- growth -----------------------------------------------------------------------------------

    def scale(self, name: str, replicas: int) -> list[str]:
        require_integer("scale", "replicas", replicas)
        role = self._roles.open_role(name, "scale")
        self._require_scalable(role, replicas, shrinks=replicas < len(role.clients))
        return self._scale(role, lambda: replicas - len(role.clients))

    def add(self, name: str, count: int) -> list[str]:
        require_integer("add_workers", "count", count)
        role = self._roles.open_role(name, "add_workers")
        self._require_scalable(role, count, shrinks=False)
        return self._scale(role, lambda: count)

    def _require_scalable(self, role: Role, replicas: int, *, shrinks: bool) -> None:
        if replicas < 1:
            raise errors.InvalidSpecError(
                role=role.name, field="replicas", value=replicas, expected="1 or more"
            )
        has_many = role.clients and role.target is None and len(role.job.tasks) > 1
        expected = "a job with one spec for all of its replicas" if has_many else ""
        self._require_own(role, "replicas", replicas, shrinks, expected)

    def _require_own(
        self, role: Role, field: str, value: Any, shrinks: bool, expected: str = ""
    ) -> None:
        """Raise InvalidSpecError unless the role owns its workers.

        With ``shrinks``, also raise if another role uses them.
        """
        if role.target is not None:
            expected = f"a role with workers of its own; these are colocated with {role.target!r}"
        elif not role.clients:
            expected = "a role with workers; this one only holds devices"
        elif (
            not expected
            and shrinks
            and (dependents := [each.name for each in self._roles.with_dependents(role.name)[:-1]])
        ):
            expected = (
                f"no fewer workers while {', '.join(dependents)} use them; delete these roles first"
            )
        if expected:
            raise errors.InvalidSpecError(
                role=role.name, field=field, value=value, expected=expected
            )

    def _scale(self, role: Role, num_more: Callable[[], int]) -> list[str]:
        async def scale() -> list[str]:
            async with role.growing:
                count = num_more()
                if count < 0:
                    await self.remove(role, role.worker_ids[count:])
                return (
                    await self._grow(role, range(role.num_ids, role.num_ids + count))
                    if count > 0
                    else []
                )

        new = run_sync(scale())
        try:
            run_sync(self._run_commands([role], new))
        except BaseException:
            run_sync(self.remove(role, new))
            raise
        return new

    async def _grow(self, role: Role, ranks: Sequence[int]) -> list[str]:
        deadline = Deadline(self._run.timeouts.start_s)
        singles = {rank: _single(role.job, rank) for rank in ranks}
        async with (
            contextlib.AsyncExitStack() as resources,
            contextlib.AsyncExitStack() as undo,
        ):
            stacks = {
                each.role: await resources.enter_async_context(contextlib.AsyncExitStack())
                for each in singles.values()
            }
            places = await self._backend.allocator.reserve(list(singles.values()), deadline, stacks)
            started = await await_all(
                self._launch(Launch(role.job, {rank: places[single.role][0]}, deadline, undo))
                for rank, single in singles.items()
            )
            clients = {client.worker_id: client for (client,) in started}
            with self._roles.changing(role):
                role.num_ids = ranks[-1] + 1
                role.clients = {**role.clients, **clients}
                for worker_id, stack in zip(clients, stacks.values(), strict=True):
                    role.own(worker_id, stack)
                undo.pop_all()
        story.info(
            "added to role %s, which now has %d workers: %s",
            role.name,
            len(role.clients),
            _described(clients.values()),
        )
        return list(clients)

    # --- removal ----------------------------------------------------------------------------------

    async def remove(self, role: Role, worker_ids: Sequence[str]) -> None:
        with self._roles.changing(role):
            for worker_id in worker_ids:
                if role.clients and worker_id not in role.clients:
                    raise not_found(worker_id, role)
            self._require_own(role, "worker_ids", list(worker_ids), shrinks=True)
            if len(worker_ids) >= len(role.clients):
                expected = "at least one worker to remain; delete_workers ends a role"
                raise errors.InvalidSpecError(
                    role=role.name, field="worker_ids", value=list(worker_ids), expected=expected
                )
            doomed = role.part(worker_ids)
        left = len(role.clients)
        story.info("removing from role %s, leaving %d: %s", role.name, left, listed(worker_ids))
        ending = asyncio.ensure_future(self._end(role, doomed))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending  # they are in no registry, so nothing else would end them
            raise

    async def _end(self, role: Role, doomed: Role) -> None:
        places = doomed.places
        restarts = [role.restarts[worker_id] for worker_id in places if worker_id in role.restarts]
        for restart in restarts:
            restart.cancel()
        if restarts:
            await asyncio.wait(restarts)
        await stop_roles([doomed], False, "remove_workers", self._run.timeouts.shutdown_s)
        for worker_id, place in places.items():
            await self._backend.allocator.give_back(worker_id, place, list(role.places.values()))


@contextlib.asynccontextmanager
async def _restarting(role: Role, worker_ids: Sequence[str]) -> AsyncIterator[None]:
    """Serialize restarts, since two would start two processes in one place.

    Removing one of the workers cancels the restart.
    """
    while running := {role.restarts[each] for each in worker_ids if each in role.restarts}:
        await asyncio.wait(running)
    task = asyncio.current_task()
    assert task is not None
    role.restarts.update(dict.fromkeys(worker_ids, task))
    try:
        yield
    except asyncio.CancelledError:
        if removed := [each for each in worker_ids if each not in role.clients]:
            raise not_found(removed[0], role) from None
        raise
    finally:
        for each in worker_ids:
            del role.restarts[each]


def _described(clients: Iterable[WorkerClient]) -> str:
    def one(client: WorkerClient) -> str:
        devices = f", devices {','.join(client.place.devices)}" if client.place.devices else ""
        return f"{client.worker_id} (pid {client.pid}, {client.node}{devices})"

    return listed([one(client) for client in clients]) or "no workers"


async def _kill_all(role: Role) -> None:
    """End all processes of a role at once.

    One after the other would hang on a rank that waits in a collective for a lost rank.
    """
    await await_all(client.kill("was ended by restart_workers") for client in role.clients.values())


def _single(job: Job, rank: int) -> Job:
    """Job with the resources of one worker of ``job``."""
    return msgspec.structs.replace(
        job, role=f"{job.role}+{rank}", replicas=1, tasks=[job.spec(rank)]
    )
