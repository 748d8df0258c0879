"""Starts of roles as transactions: all jobs of a start are ready and published, or nothing of them remains."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from helmsman.api import errors
from helmsman.api.plan import Reservation
from helmsman.api.scheduler import Job
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._aio.event_loop import await_all, forbid_blocking, run_sync
from helmsman.controller._node.environment import worker_environment
from helmsman.controller._placement.colocation import targets_first, tile
from helmsman.controller._placement.placement import Placement
from helmsman.controller._schedulers.backend import Backend, Launch, Run
from helmsman.controller._schedulers.calls import CallService
from helmsman.controller._schedulers.roles import Role, RoleRegistry, by_id, rank_of, stop_roles
from helmsman.controller._transport.client import WorkerClient
from helmsman.rpc_server._wire.messages import Verb, WorkerConfig

_COMMAND_ENGINE = "helmsman.rpc_server._process.command.CommandEngine"


class RoleStarter:
    """Starts and ends roles by a backend; see Scheduler for the arguments."""

    def __init__(self, run: Run, roles: RoleRegistry, backend: Backend, calls: CallService) -> None:
        self.advice: dict[str, str] = {}
        """Role -> next step that its controller suggests when a worker has died."""
        self._run = run
        self._roles = roles
        self._backend = backend
        self._calls = calls

    def create(self, jobs: Sequence[Job]) -> list[str]:
        """As Scheduler.create_workers, of jobs that are valid."""
        roles = self._publish(jobs, "create_workers", lambda: self._start_roles(jobs))
        try:
            run_sync(self.run_commands(roles, [worker_id for role in roles for worker_id in role.worker_ids]))
        except BaseException:
            for role in reversed(roles):
                with contextlib.suppress(errors.RoleNotFoundError):  # it went with its target
                    self.delete(role.name)
            raise
        return [worker_id for role in roles for worker_id in role.worker_ids]

    def reserve(self, job: Job) -> list[Reservation]:
        """As Scheduler.reserve, of a job that is valid."""
        if job.scheduling_strategy.type != "separation":
            raise errors.InvalidSpecError(
                role=job.role,
                field="scheduling_strategy",
                value=job.scheduling_strategy,
                expected="separation, to hold something",
            )

        async def hold() -> list[Role]:
            async with contextlib.AsyncExitStack() as resources:
                places = await self._backend.allocator.hold(job, Deadline(self._run.timeouts.start_s), resources)
                return [Role(job, {}, resources.pop_all(), reserved=by_id(job, places))]

        (role,) = self._publish([job], "reserve", hold)
        return [place.as_reservation() for place in role.places.values()]

    def delete(self, name: str | None, reverse_order: bool = False) -> None:
        """As Scheduler.delete_workers."""
        forbid_blocking()  # before the roles are forgotten
        run_sync(stop_roles(self._roles.forget(name), reverse_order, "delete_workers", self._run.timeouts.shutdown_s))

    def _publish(self, jobs: Sequence[Job], operation: str, start: Callable[[], Coroutine[Any, Any, list[Role]]]) -> list[Role]:
        with self._roles.claim(jobs, operation):
            roles = run_sync(start())
            try:
                self._roles.publish(roles, operation)
            except errors.HelmsmanError:
                run_sync(stop_roles(roles[::-1], False, operation, self._run.timeouts.shutdown_s))
                raise
        return roles

    async def _start_roles(self, jobs: Sequence[Job]) -> list[Role]:
        deadline = Deadline(self._run.timeouts.start_s)
        colocated = targets_first(jobs, [role.name for role in self._roles])
        started: dict[str, Role] = {}

        async def start(job: Job, places: Sequence[Placement]) -> None:
            clients = await self.launch(Launch(job, dict(enumerate(places)), deadline, stacks[job.role]))
            started[job.role] = Role(job, by_id(job, clients), stacks[job.role])

        async with contextlib.AsyncExitStack() as resources:
            stacks = {job.role: await resources.enter_async_context(contextlib.AsyncExitStack()) for job in jobs}
            separate = [job for job in jobs if job.scheduling_strategy.type == "separation"]
            places = await self._backend.allocator.reserve(separate, deadline, stacks) if separate else {}
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
        return [started[job.role] for job in jobs]

    async def launch(self, start: Launch) -> list[WorkerClient]:
        """Start workers and make them ready. Raises: StartError."""
        clients = await self._backend.launch(start)
        await await_all(self._prepare(start, *pair) for pair in zip(start.places, clients, strict=True))
        return clients

    async def _prepare(self, start: Launch, rank: int, client: WorkerClient) -> None:
        """Configure a new worker and have it lease its ports, before it is published."""
        job = start.job
        client.advice = self.advice
        spec = job.spec(rank)
        limit_s = max(start.deadline.remaining_s, 0.001)
        try:
            if not self._backend.shares_process:
                same_machine = self._backend.same_machine
                config = WorkerConfig(
                    role=job.role,
                    rank=rank,
                    seed=self._run.seed,
                    environment=worker_environment(os.environ, spec, client.environment, same_machine=same_machine),
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

    async def run_commands(self, roles: Sequence[Role], worker_ids: Sequence[str]) -> None:
        """Run a module beside each of these workers whose spec has a command."""
        jobs = {role.name: role.job for role in roles}

        async def run(worker_id: str, command: str) -> None:
            ports = self._roles.client(worker_id).engine_ports
            await self._calls.create_engine(worker_id, _COMMAND_ENGINE, None, (command, ports), {})

        commands = {each: jobs[each.rpartition("/")[0]].spec(rank_of(each)).cmd for each in worker_ids}
        await await_all(run(worker_id, command) for worker_id, command in commands.items() if command)
