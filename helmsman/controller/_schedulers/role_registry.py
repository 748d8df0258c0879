"""The book of roles that all schedulers keep: starts as transactions over several jobs, restarts, plans, teardown.

A backend says what there is (``_snapshot``), takes it (``_reserve``) and starts processes there (``_launch``), nothing else.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.api import errors
from helmsman.api.plan import Plan, PlannedRole, Reservation
from helmsman.api.platforms import forbid_in_this_process
from helmsman.api.scheduler import Job, Scheduler, SchedulingStrategy, Timeouts, Worker
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._aio.event_loop import await_all, forbid_blocking, run_sync
from helmsman.controller._node.cleanup import remove_old_logs
from helmsman.controller._node.environment import worker_environment
from helmsman.controller._node.run_registry import RunLock, default_log_dir, new_run_id
from helmsman.controller._placement.admission import busy, require_feasible
from helmsman.controller._placement.colocation import targets_first, tile
from helmsman.controller._placement.place import Place
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.snapshot import ClusterSnapshot
from helmsman.controller._schedulers.role import Role, by_id, not_found, rank_of, stop_roles
from helmsman.controller._transport.client import WorkerClient
from helmsman.controller._validation.argument_types import checked
from helmsman.rpc_server._wire.messages import Verb, WorkerConfig, WorkerIdentity

log = logging.getLogger(__name__)


class RoleBook(Scheduler):
    """The roles of a run, from their start to their end.

    Args:
        seed: seed of the run; each worker seeds from (seed, role, rank).
        log_dir: folder for a log file per worker; a folder of the run below the system's temporary one when None.
        timeouts: limits by class of operation.
    """

    _seeds_workers = True
    _same_machine = False
    """Whether a worker has no environment but what this process gives it."""

    def __init__(self, *, seed: int = 0, log_dir: str | Path | None = None, timeouts: Timeouts | None = None) -> None:
        self.timeouts = timeouts or Timeouts()
        self.run_id = new_run_id()
        self._seed = seed
        self._log_dir = Path(log_dir).absolute() if log_dir is not None else default_log_dir(self.run_id)
        self._roles: dict[str, Role] = {}
        self._starting: set[str] = set()
        self._book = threading.Lock()
        self._closed = False
        self._parents_roles: dict[str, Role] | None = None
        """In a forked child: never used, but kept, since what is let go of while it waits complains."""
        self._advice: dict[str, str] = {}
        """Role -> what its controller advises when a worker has died."""
        _books.add(self)
        self._platform_guard = self._guard_platform()
        self._record = self._open_record()
        remove_old_logs()
        atexit.register(self.close)

    # --- hooks ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _snapshot(self) -> ClusterSnapshot:
        """What there is and what of it is free. Blocks for one look at a cluster at most."""

    def _as_planned_for(self, job: Job) -> Job:
        """The job without what this backend does not count."""
        return job

    def _holders(self, jobs: Sequence[Job]) -> str:
        """Who holds what the jobs ask for, for people."""
        return "others"

    @abc.abstractmethod
    async def _reserve(
        self, jobs: Sequence[Job], deadline: Deadline, resources: Mapping[str, contextlib.AsyncExitStack]
    ) -> Mapping[str, Sequence[Place]]:
        """Take what all of these jobs need, or nothing; returns the place of each replica in rank order, by role.

        What is taken for a job is pushed on its role's stack as it is taken. Raises: PlacementInfeasibleError,
        PlacementTimeoutError.
        """

    @abc.abstractmethod
    async def _launch(
        self,
        job: Job,
        ranks: Sequence[int],
        places: Sequence[Place],
        deadline: Deadline,
        resources: contextlib.AsyncExitStack,
    ) -> list[WorkerClient]:
        """Start a process for each of these ranks at its place, and return clients that can reach them, in rank order.

        Everything acquired is pushed on ``resources`` as it is acquired, so that unwinding it ends the processes at once and
        frees what they held. A place of a sibling (``Place.shared``) has devices that its target holds. Raises: StartError.
        """

    async def _hold(
        self, job: Job, deadline: Deadline, resources: contextlib.AsyncExitStack
    ) -> list[tuple[Place, Reservation]]:
        """Take what each replica needs and say what it is, or nothing; as _reserve."""
        places = await self._reserve([job], deadline, {job.role: resources})
        return [
            (place, Reservation(node_id=place.node_id, node=place.node, devices=place.devices)) for place in places[job.role]
        ]

    def _guard_platform(self) -> contextlib.ExitStack:
        """What holds for the platform in this process while the scheduler is open: a driver needs no accelerator."""
        return forbid_in_this_process("this process drives workers through a scheduler")

    async def _sweep(self) -> None:
        """Free what the backend itself holds, when the scheduler closes."""

    def _forget_values(self) -> None:
        """Give up the values that the script has put, when the scheduler closes."""

    # --- roles ------------------------------------------------------------------------------------------------------

    @checked
    def create_workers(self, job: Job | Collection[Job]) -> list[str]:
        jobs = self._valid_jobs(job)
        roles = self._publish(jobs, "create_workers", self._start_roles)
        self._run_commands(roles)
        return [worker_id for role in roles for worker_id in role.worker_ids]

    @checked
    def reserve(self, job: Job) -> list[Reservation]:
        jobs = self._valid_jobs(job)
        if job.scheduling_strategy.type != "separation":
            raise errors.InvalidSpecError(
                role=job.role,
                field="scheduling_strategy",
                value=job.scheduling_strategy,
                expected="separation, to hold something",
            )
        held: list[tuple[Place, Reservation]] = []

        async def hold(jobs: Sequence[Job]) -> list[Role]:
            async with contextlib.AsyncExitStack() as resources:
                held.extend(await self._hold(jobs[0], Deadline(self.timeouts.start_s), resources))
                places = by_id(jobs[0], [place for place, _ in held])
                return [Role(jobs[0], {}, resources.pop_all(), reserved=places)]

        self._publish(jobs, "reserve", hold)
        return [reservation for _, reservation in held]

    def _publish(
        self, jobs: Sequence[Job], operation: str, start: Callable[[Sequence[Job]], Coroutine[Any, Any, list[Role]]]
    ) -> list[Role]:
        """Start roles whose names are free, and let them be known once all of them are ready."""
        self._require_open(operation)
        with self._book:
            for each in jobs:
                if each.role in self._roles or each.role in self._starting:
                    running = self._roles.get(each.role)
                    raise errors.RoleExistsError(role=each.role, num_workers=len(running.places) if running else each.replicas)
            self._starting.update(each.role for each in jobs)
        try:
            roles = run_sync(start(jobs))
            with self._book:
                known = {*self._roles, *(role.name for role in roles)}
                lost = [role.target for role in roles if role.target is not None and role.target not in known]
                published = not (self._closed or lost)
                if published:
                    self._roles.update((role.name, role) for role in roles)
        finally:
            with self._book:
                self._starting.difference_update(each.role for each in jobs)
        if not published:  # another thread has closed this or deleted a target, and did not know of these roles yet
            run_sync(stop_roles(roles[::-1], False, operation, self.timeouts.shutdown_s))
            self._require_open(operation)
            raise errors.RoleNotFoundError(name=str(lost[0]), known=list(self._roles))
        return roles

    @staticmethod
    def _valid_jobs(job: Job | Collection[Job]) -> list[Job]:
        jobs = [job] if isinstance(job, Job) else list(job)
        for index, each in enumerate(jobs):
            each.validate()
            if each.role in {other.role for other in jobs[:index]}:
                raise errors.InvalidSpecError(
                    role=each.role, field="role", value=each.role, expected="a name of its own among the jobs of one start"
                )
        return jobs

    async def _start_roles(self, jobs: Sequence[Job]) -> list[Role]:
        """Start all of these roles, or none."""
        deadline = Deadline(self.timeouts.start_s)
        colocated = targets_first(jobs, self._roles)
        started: dict[str, Role] = {}

        async def start(job: Job, places: Sequence[Place]) -> None:
            clients = await self._launch(job, range(job.replicas), places, deadline, stacks[job.role])
            await await_all(self._prepare(job, index, client, deadline) for index, client in enumerate(clients))
            started[job.role] = Role(job, by_id(job, clients), stacks[job.role])

        async with contextlib.AsyncExitStack() as resources:
            stacks = {job.role: await resources.enter_async_context(contextlib.AsyncExitStack()) for job in jobs}
            separate = [job for job in jobs if job.scheduling_strategy.type == "separation"]
            places = await self._reserve(separate, deadline, stacks) if separate else {}
            await await_all(start(job, places[job.role]) for job in separate)
            for job in colocated:
                target = started.get(str(job.scheduling_strategy.target)) or self._role(str(job.scheduling_strategy.target))
                shares = tile(job, target.workers)
                if job.scheduling_strategy.fork:
                    targets = list(target.places.values())
                    await start(job, [Place.beside(share, targets) for share in shares])
                else:
                    owners = list(target.clients.values())
                    clients = by_id(job, [owners[share.targets[0]] for share in shares])
                    started[job.role] = Role(job, clients, stacks[job.role], reuses=True)
            for role in started.values():
                role.resources = stacks[role.name].pop_all()
        return [started[job.role] for job in jobs]

    async def _prepare(self, job: Job, index: int, client: WorkerClient, deadline: Deadline) -> None:
        """Configure a new worker and have it lease its ports, before anybody else may see it."""
        client.advice = self._advice
        spec = job.spec(index)
        limit_s = max(deadline.remaining_s, 0.001)
        try:
            if self._seeds_workers:
                config = WorkerConfig(
                    role=job.role,
                    rank=index,
                    seed=self._seed,
                    environment=worker_environment(os.environ, spec, client.environment, same_machine=self._same_machine),
                    grant=client.place.grant(client.worker_id),
                )
                await client.control(Verb.CONFIGURE, config, limit_s=limit_s)
            if num_ports := spec.port_count or (1 if spec.cmd else 0):
                ports = await client.control(Verb.LEASE_PORTS, num_ports, limit_s=limit_s)
                client.engine_ports = [str(port) for port in ports]
        except errors.CallError as error:
            tail = error.log_tail if isinstance(error, errors.WorkerFailedError) else ""
            raise errors.WorkerStartError(
                role=job.role,
                worker_id=client.worker_id,
                node=client.node,
                reason=str(error).split("\n", 1)[0],
                log_path=client.log_path,
                log_tail=tail,
            ) from error

    @checked
    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        self._require_open("get_workers")
        entry = self._role(role)
        limit_s = self.timeouts.health_s if timeout is None else timeout

        async def answered() -> None:
            await await_all(client.control(Verb.HEALTH, limit_s=limit_s) for client in entry.clients.values())

        if limit_s > 0:
            run_sync(answered())
        return [
            Worker(
                id=worker_id,
                ip=client.node,
                engine_ports=list(client.engine_ports),
                node_id=client.place.node_id,
                devices=list(client.place.devices),
            )
            for worker_id, client in entry.clients.items()
        ]

    @checked
    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        if role is not None:
            self._require_open("delete_workers")
            self._role(role)
        forbid_blocking()  # before the roles are forgotten
        with self._book:
            doomed = self._with_dependents(role) if role is not None else list(reversed(self._roles.values()))
            for entry in doomed:
                del self._roles[entry.name]
        run_sync(stop_roles(doomed, reverse_order, "delete_workers", self.timeouts.shutdown_s))

    def _with_dependents(self, role: str) -> list[Role]:
        """The role and all that are colocated with it, dependents first: they cannot outlive the workers or devices they
        use."""
        found = [self._roles[role]]
        for entry in self._roles.values():  # in order of creation, so a dependent comes after what it depends on
            if any(entry.job.scheduling_strategy.target == other.name for other in found):
                found.append(entry)
        return list(reversed(found))

    @checked
    def fork_workers(self, role: str, target_role: str, command: str | None = None) -> list[str]:
        self._require_open("fork_workers")
        target = self._role(target_role)
        return self.create_workers(
            Job(
                role=role,
                replicas=len(target.clients),
                tasks=[
                    msgspec.structs.replace(target.job.spec(rank_of(worker_id)), cmd=command, gpu=0)
                    for worker_id in target.worker_ids
                ],
                scheduling_strategy=SchedulingStrategy(type="colocation", target=target_role, fork=True),
            )
        )

    def _run_commands(self, roles: Sequence[Role]) -> None:
        """Run a module beside each worker whose spec says so; when one does not start, all of these roles go."""
        commands = {
            worker_id: command
            for role in roles
            for index, worker_id in enumerate(role.worker_ids)
            if (command := role.job.spec(index).cmd)
        }

        async def run_all() -> None:
            await await_all(self._run_command(worker_id, command) for worker_id, command in commands.items())

        try:
            run_sync(run_all())
        except BaseException:
            for role in reversed(roles):
                with contextlib.suppress(errors.RoleNotFoundError):  # it went with its target
                    self.delete_workers(role.name)
            raise

    async def _run_command(self, worker_id: str, command: str) -> None:
        engine = "helmsman.rpc_server._process.command.CommandEngine"
        await self.create_engine(worker_id, engine, None, command, self._client(worker_id).engine_ports)

    # --- plans ------------------------------------------------------------------------------------------------------

    @checked
    def plan(self, jobs: Job | Collection[Job]) -> Plan:
        valid = self._valid_jobs(jobs)
        self._require_open("plan")
        return self._plan(valid)

    def _plan(self, jobs: Sequence[Job]) -> Plan:
        """A place for every rank in what is free now. Raises PlacementInfeasibleError, or PlacementTimeoutError when others
        hold what would do."""
        snapshot = self._snapshot()
        asked = [self._as_planned_for(job) for job in jobs]
        outcome = plan_jobs(snapshot, asked, running=self._planned_roles())
        if isinstance(outcome, Plan):
            return outcome
        require_feasible(snapshot, asked, self._planned_roles())
        raise busy(asked, snapshot, self._holders(asked), Deadline(0.0))

    def _planned_roles(self) -> list[PlannedRole]:
        """The roles that run, as a plan has them."""
        return [role.as_planned() for role in list(self._roles.values())]

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._closed:
            forbid_blocking()  # before anything counts as closed
        with self._book:
            if self._closed:
                return
            self._closed = True
            doomed = list(reversed(self._roles.values()))
            self._roles.clear()
        atexit.unregister(self.close)
        run_sync(self._close(doomed))

    async def _close(self, doomed: list[Role]) -> None:
        try:
            await stop_roles(doomed, True, "close", self.timeouts.shutdown_s)
        finally:
            self._forget_values()
            await self._sweep()
            self._platform_guard.close()
            if self._record is not None:
                self._record.release()

    def _open_record(self) -> RunLock | None:
        """By which ``helmsman clean`` tells this run from one whose controller has died."""
        try:
            return RunLock(self.run_id, type(self).__name__, self._log_dir)
        except OSError as error:
            log.warning("run %s has no record, and helmsman clean will not know it: %s", self.run_id, error)
            return None

    def _leave_to_parent(self) -> None:
        """In a forked child: the connections are the parent's, which would take the child's answers for its own, and so are the
        workers, which the end of a child must not end."""
        self._book = threading.Lock()
        self._closed = True
        self._roles, self._parents_roles = {}, self._roles

    def _advise(self, role: str, next_step: str) -> None:
        if next_step:
            self._advice[role] = next_step
        else:
            self._advice.pop(role, None)

    # --- look-ups ---------------------------------------------------------------------------------------------------

    def _require_open(self, operation: str) -> None:
        if self._closed:
            raise errors.SchedulerClosedError(operation=operation, in_child=self._parents_roles is not None)

    def _role(self, name: str) -> Role:
        role = self._roles.get(name)
        if role is None:
            raise errors.RoleNotFoundError(name=name, known=list(self._roles))
        return role

    def _client(self, worker_id: str) -> WorkerClient:
        if self._closed:
            self._require_open("a call")
        role = self._roles.get(worker_id.rpartition("/")[0])
        client = role.clients.get(worker_id) if role is not None else None
        if client is None:
            raise not_found(worker_id, *self._roles.values())
        return client

    def _identity(self, job: Job, index: int, node: str) -> WorkerIdentity:
        return WorkerIdentity(
            run_id=self.run_id,
            worker_id=f"{job.role}/{index}",
            role=job.role,
            rank=index,
            node=node,
            log_path=str(self._log_dir / f"{job.role}-{index}.log"),
        )


_books: weakref.WeakSet[RoleBook] = weakref.WeakSet()


def _after_fork() -> None:
    for book in list(_books):
        book._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
