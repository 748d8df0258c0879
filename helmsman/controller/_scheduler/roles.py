"""Registry of running roles."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from helmsman.api import errors
from helmsman.api.plan import PlannedInstance, PlannedRole, PlannedWorker
from helmsman.api.scheduler import Job
from helmsman.controller._placement.placement import Placement
from helmsman.controller._scheduler.transport.client import WorkerClient

log = logging.getLogger(__name__)


T = TypeVar("T")


class Role:
    """A running role: its workers, and the resources to free when it ends.

    A reserved role has places but no workers.
    """

    def __init__(
        self,
        job: Job,
        clients: Mapping[str, WorkerClient],
        resources: contextlib.AsyncExitStack,
        *,
        reuses: bool = False,
        reserved: Mapping[str, Placement] | None = None,
    ) -> None:
        self.job = job
        """The job as started; the number of workers may have changed since."""
        self.clients = dict(clients)
        """Clients by worker id, in rank order.

        Ids may have gaps, since the id of a removed worker is not reused. The dict is replaced,
        never mutated, because other threads iterate over it.
        """
        self._reserved = dict(reserved or {})
        self.num_ids = job.replicas
        """Number of ids assigned so far."""
        self.resources = resources
        self.reuses = reuses
        """Whether the workers belong to another role (colocation without fork)."""
        self.engine_names: dict[str, set[str]] = {}
        self.growing = asyncio.Lock()
        """Held while workers are added."""
        self.restarts: dict[str, asyncio.Task[None]] = {}
        """Running restarts, by worker id."""
        self.num_restarts: collections.Counter[str] = collections.Counter()
        """Completed restarts, by worker id."""
        self._own: dict[str, contextlib.AsyncExitStack] = {}
        """Resources of single workers: those added later or restarted."""

    def own(self, worker_id: str, resources: contextlib.AsyncExitStack) -> None:
        """Add resources to free when this worker ends, besides those shared by the role."""
        self._own.setdefault(worker_id, contextlib.AsyncExitStack()).push_async_callback(
            resources.pop_all().aclose
        )

    def part(self, worker_ids: Iterable[str]) -> Role:
        """Split these workers off; returns them as a role to stop."""
        doomed = Role(
            self.job,
            {worker_id: self.clients[worker_id] for worker_id in worker_ids},
            contextlib.AsyncExitStack(),
        )
        self.clients = {
            each: client for each, client in self.clients.items() if each not in doomed.clients
        }
        for worker_id in doomed.clients:
            self.engine_names.pop(worker_id, None)
            if (stack := self._own.pop(worker_id, None)) is not None:
                doomed._own[worker_id] = stack
        return doomed

    async def free(self) -> None:
        async with self.resources, contextlib.AsyncExitStack() as own:
            for stack in self._own.values():
                own.push_async_callback(stack.aclose)

    @property
    def name(self) -> str:
        return self.job.role

    @property
    def worker_ids(self) -> list[str]:
        return list(self.clients)

    @property
    def places(self) -> dict[str, Placement]:
        return self._reserved or {
            worker_id: client.place for worker_id, client in self.clients.items()
        }

    @property
    def workers(self) -> list[PlannedWorker]:
        return [place.as_planned(worker_id) for worker_id, place in self.places.items()]

    @property
    def target(self) -> str | None:
        return self.job.scheduling_strategy.target

    def as_planned(self) -> PlannedRole:
        """The role in the form of a plan.

        It has no bundles: the cluster itself counts the resources of its placement groups.
        """
        return PlannedRole(
            role=self.name,
            accelerator=next((place.accelerator for place in self.places.values()), ""),
            target=self.target,
            instances=(PlannedInstance(index=0, bundles=(), workers=tuple(self.workers)),),
        )


class RoleRegistry:
    """The ready roles of a scheduler. Thread-safe."""

    def __init__(self) -> None:
        self._roles: dict[str, Role] = {}
        self._starting: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._parents_roles: dict[str, Role] | None = None
        """Forked child only: keeps the parent's roles referenced, so that asyncio does not log
        their pending tasks.
        """
        _registries.add(self)

    @property
    def is_closed(self) -> bool:
        """Whether the scheduler is closed, or this process is a fork of the one that created it."""
        return self._closed

    def require_open(self, operation: str) -> None:
        if self._closed:
            raise errors.SchedulerClosedError(
                operation=operation, in_child=self._parents_roles is not None
            )

    # --- look-ups ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Role]:
        """Iterate over the roles in order of creation."""
        return iter(list(self._roles.values()))

    def role(self, name: str) -> Role:
        """Look up a role by name.

        Raises:
            RoleNotFoundError: There is no such role.
        """
        role = self._roles.get(name)
        if role is None:
            raise errors.RoleNotFoundError(name=name, known=list(self._roles))
        return role

    def open_role(self, name: str, operation: str) -> Role:
        """Look up a role by name, for an operation of the scheduler.

        Raises:
            SchedulerClosedError: The scheduler is closed.
            RoleNotFoundError: There is no such role.
        """
        self.require_open(operation)
        return self.role(name)

    def note_engine(self, worker_id: str, engine_name: str) -> None:
        """Record an engine, so that a role that reuses workers can destroy its engines."""
        role = self._roles.get(worker_id.rpartition("/")[0])
        if role is not None:  # else it was deleted meanwhile
            role.engine_names.setdefault(worker_id, set()).add(engine_name)

    def client(self, worker_id: str) -> WorkerClient:
        """Look up the client of a worker.

        Raises:
            SchedulerClosedError: The scheduler is closed.
            WorkerNotFoundError: There is no such worker.
        """
        if self._closed:
            self.require_open("a call")
        role = self._roles.get(worker_id.rpartition("/")[0])
        client = role.clients.get(worker_id) if role is not None else None
        if client is None:
            raise not_found(worker_id, *self)
        return client

    def clients(self) -> list[WorkerClient]:
        """Clients of all roles; a client that several roles share is repeated."""
        return [client for role in self for client in role.clients.values()]

    def with_dependents(self, name: str) -> list[Role]:
        """A role and all roles colocated with it, dependents first.

        Dependents cannot outlive the workers or devices that they use.
        """
        found = [self.role(name)]
        for role in self:  # a dependent was created after the role that it depends on
            if any(role.target == other.name for other in found):
                found.append(role)
        return found[::-1]

    # --- changes ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claim(self, jobs: Sequence[Job], operation: str) -> Iterator[None]:
        """Hold the names of roles while they start.

        Raises:
            SchedulerClosedError: The scheduler is closed.
            RoleExistsError: A role of this name runs or starts.
        """
        self.require_open(operation)
        names = {job.role for job in jobs}
        with self._lock:
            for job in jobs:
                if job.role in self._roles or job.role in self._starting:
                    running = self._roles.get(job.role)
                    raise errors.RoleExistsError(
                        role=job.role, num_workers=len(running.places) if running else job.replicas
                    )
            self._starting |= names
        try:
            yield
        finally:
            with self._lock:
                self._starting -= names

    def publish(self, roles: Sequence[Role], operation: str) -> None:
        """Add roles that are ready.

        Raises:
            SchedulerClosedError: The scheduler has been closed meanwhile.
            RoleNotFoundError: Another thread has deleted the target of a role meanwhile.
        """
        with self._lock:
            self.require_open(operation)
            known = {*self._roles, *(role.name for role in roles)}
            for role in roles:
                if role.target is not None and role.target not in known:
                    raise errors.RoleNotFoundError(name=role.target, known=list(self._roles))
            self._roles.update((role.name, role) for role in roles)

    @contextlib.contextmanager
    def changing(self, role: Role) -> Iterator[None]:
        """Lock the registry while the workers of a role change.

        Raises:
            RoleNotFoundError: The role has been deleted.
        """
        with self._lock:
            if self._roles.get(role.name) is not role:
                raise errors.RoleNotFoundError(name=role.name, known=list(self._roles))
            yield

    def forget(self, name: str | None) -> list[Role]:
        """Remove a role with its dependents, or all roles; returns them, dependents first."""
        with self._lock:
            doomed = self.with_dependents(name) if name is not None else list(self)[::-1]
            for role in doomed:
                del self._roles[role.name]
        return doomed

    def close(self) -> list[Role] | None:
        """Remove all roles for good; returns them, last first, or None if already closed."""
        with self._lock:
            if self._closed:
                return None
            self._closed = True
            doomed = list(self)[::-1]
            self._roles.clear()
        return doomed

    def leave_to_parent(self) -> None:
        """Forked child only: drop the workers, which belong to the parent.

        The child must not end them, and on the shared connections replies to its calls would be
        taken for replies to the parent's.
        """
        self._lock = threading.Lock()
        self._closed = True
        self._roles, self._parents_roles = {}, self._roles


_registries: weakref.WeakSet[RoleRegistry] = weakref.WeakSet()


def _after_fork() -> None:
    for registry in list(_registries):
        registry.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def by_id(job: Job, replicas: Sequence[T]) -> dict[str, T]:
    """Map worker ids to the items of a starting job's replicas."""
    return {f"{job.role}/{index}": each for index, each in enumerate(replicas)}


def rank_of(worker_id: str) -> int:
    return int(worker_id.rpartition("/")[2])


def not_found(worker_id: str, *roles: Role) -> errors.WorkerNotFoundError:
    """Build the error for a worker id that none of these roles has."""
    return errors.WorkerNotFoundError(
        name=worker_id, known=[each for role in roles for each in role.worker_ids]
    )
