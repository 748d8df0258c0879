"""The roles of a scheduler by name."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence

from helmsman.api import errors
from helmsman.api.scheduler import Job
from helmsman.controller._schedulers.role import Role, not_found
from helmsman.controller._transport.client import WorkerClient


class RoleRegistry:
    """Roles from the moment when they are ready until they end. It may be used from any thread."""

    def __init__(self) -> None:
        self._roles: dict[str, Role] = {}
        self._starting: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._parents_roles: dict[str, Role] | None = None
        """Forked child only: keeps the parent's roles referenced, so that asyncio does not log pending work of theirs."""
        _registries.add(self)

    @property
    def is_closed(self) -> bool:
        """Whether the scheduler is closed, or this process is a forked child of its own."""
        return self._closed

    def require_open(self, operation: str) -> None:
        """Raise SchedulerClosedError if the scheduler is closed."""
        if self._closed:
            raise errors.SchedulerClosedError(operation=operation, in_child=self._parents_roles is not None)

    # --- look-ups ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Role]:
        """The roles in order of creation."""
        return iter(list(self._roles.values()))

    def role(self, name: str) -> Role:
        """The role of a name. Raises RoleNotFoundError."""
        role = self._roles.get(name)
        if role is None:
            raise errors.RoleNotFoundError(name=name, known=list(self._roles))
        return role

    def open_role(self, name: str, operation: str) -> Role:
        """The role of a name. Raises SchedulerClosedError, RoleNotFoundError."""
        self.require_open(operation)
        return self.role(name)

    def note_engine(self, worker_id: str, engine_name: str) -> None:
        """Note an engine that a role has created, for the end of a role whose workers are another's."""
        role = self._roles.get(worker_id.rpartition("/")[0])
        if role is not None:  # else it was deleted meanwhile
            role.engine_names.setdefault(worker_id, set()).add(engine_name)

    def client(self, worker_id: str) -> WorkerClient:
        """The worker of an id. Raises SchedulerClosedError, WorkerNotFoundError."""
        if self._closed:
            self.require_open("a call")
        role = self._roles.get(worker_id.rpartition("/")[0])
        client = role.clients.get(worker_id) if role is not None else None
        if client is None:
            raise not_found(worker_id, *self)
        return client

    def clients(self) -> list[WorkerClient]:
        """The workers of all roles; one that several roles use is there several times."""
        return [client for role in self for client in role.clients.values()]

    def with_dependents(self, name: str) -> list[Role]:
        """A role and all that are colocated with it, dependents first: they cannot outlive the workers or devices they use."""
        found = [self.role(name)]
        for role in self:  # a dependent was created after the role that it depends on
            if any(role.target == other.name for other in found):
                found.append(role)
        return found[::-1]

    # --- changes ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claim(self, jobs: Sequence[Job], operation: str) -> Iterator[None]:
        """Hold the names of roles while they start. Raises SchedulerClosedError, RoleExistsError."""
        self.require_open(operation)
        names = {job.role for job in jobs}
        with self._lock:
            for job in jobs:
                if job.role in self._roles or job.role in self._starting:
                    running = self._roles.get(job.role)
                    raise errors.RoleExistsError(role=job.role, num_workers=len(running.places) if running else job.replicas)
            self._starting |= names
        try:
            yield
        finally:
            with self._lock:
                self._starting -= names

    def publish(self, roles: Sequence[Role], operation: str) -> None:
        """Add roles that are ready. Raises SchedulerClosedError, or RoleNotFoundError when another thread has deleted the
        target of one meanwhile."""
        with self._lock:
            self.require_open(operation)
            known = {*self._roles, *(role.name for role in roles)}
            for role in roles:
                if role.target is not None and role.target not in known:
                    raise errors.RoleNotFoundError(name=role.target, known=list(self._roles))
            self._roles.update((role.name, role) for role in roles)

    @contextlib.contextmanager
    def changing(self, role: Role) -> Iterator[None]:
        """Hold the registry while the workers of a role change. Raises RoleNotFoundError if the role has been deleted."""
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
        """Remove all roles for good; returns them, the last first, or None if it has been closed before."""
        with self._lock:
            if self._closed:
                return None
            self._closed = True
            doomed = list(self)[::-1]
            self._roles.clear()
        return doomed

    def leave_to_parent(self) -> None:
        """Forked child only: give up the workers, which are the parent's. Replies to a child's calls would be taken for the
        parent's on the shared connections, and the end of a child must not end them."""
        self._lock = threading.Lock()
        self._closed = True
        self._roles, self._parents_roles = {}, self._roles


_registries: weakref.WeakSet[RoleRegistry] = weakref.WeakSet()


def _after_fork() -> None:
    for registry in list(_registries):
        registry.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
