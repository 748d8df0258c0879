"""Roles that change while they run: workers are started again, come and go. A worker keeps its id, and none is given twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from helmsman.api import errors
from helmsman.api.scheduler import Job
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._aio.event_loop import await_all, run_sync
from helmsman.controller._placement.place import Place
from helmsman.controller._schedulers.role import Role, not_found, rank_of, stop_roles
from helmsman.controller._schedulers.role_registry import RoleBook
from helmsman.controller._transport.client import WorkerClient
from helmsman.controller._validation.argument_types import checked, refusal


class ElasticRoles(RoleBook):
    """Restarts, growth and removal on top of the book of roles; see RoleBook for the arguments."""

    @checked
    def restart_worker(self, worker_id: str) -> None:
        self._client(worker_id)
        role = self._role(worker_id.rpartition("/")[0])
        if role.reuses:
            raise errors.InvalidSpecError(
                role=role.name, field="worker_id", value=worker_id, expected=f"a worker of {role.target!r}, to which it belongs"
            )
        run_sync(self._restart(role, worker_id))
        if command := role.job.spec(rank_of(worker_id)).cmd:
            run_sync(self._run_command(worker_id, command))

    async def _restart(self, role: Role, worker_id: str) -> None:
        async with self._restarting(role, [worker_id]):
            await self._start_again(role, worker_id)

    @staticmethod
    @contextlib.asynccontextmanager
    async def _restarting(role: Role, worker_ids: Sequence[str]) -> AsyncIterator[None]:
        """One restart at a time, or a place has two processes; the removal of one of these workers cancels it."""
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

    async def _start_again(self, role: Role, worker_id: str) -> None:
        rank, old = rank_of(worker_id), role.clients.get(worker_id)
        if old is None:
            raise not_found(worker_id, role)
        async with contextlib.AsyncExitStack() as resources:
            deadline = Deadline(self.timeouts.start_s)
            await old.kill("was ended by restart_worker")
            place = await self._place_again(role, old, deadline, resources)
            client = await self._start_rank(role.job, rank, place, deadline, resources)
            with self._book:
                if self._roles.get(role.name) is not role:  # deleted by another thread
                    raise errors.RoleNotFoundError(name=role.name, known=list(self._roles))
                if role.clients.get(worker_id) is not old:
                    raise not_found(worker_id, role)
                for entry in self._roles.values():  # also those that reuse it
                    for each in [each for each, reached in entry.clients.items() if reached is old]:
                        entry.clients = {**entry.clients, each: client}
                        entry.engine_names.pop(each, None)
                role.own(worker_id, resources)

    @checked
    def restart_workers(self, role: str, *, elsewhere: bool = False) -> None:
        self._require_open("restart_workers")
        entry = self._role(role)
        users = [each.name for each in self._roles.values() if each.target == role and (elsewhere or each.reuses)]
        expected = ""
        if entry.reuses or not entry.clients:
            expected = f"a role with workers of its own; these are {entry.target or 'nobody'}'s"
        elif users:
            expected = f"a role whose workers no other stands on; {', '.join(users)} would go with them"
        if expected:
            raise errors.InvalidSpecError(role=role, field="role", value=role, expected=expected)
        if elsewhere:
            ranks = [rank_of(worker_id) for worker_id in entry.clients]  # as many as there are, which is what may have changed
            specs = [entry.job.spec(rank) for rank in ranks] if len(entry.job.tasks) > 1 else entry.job.tasks
            run_sync(self._kill_all(entry))
            self.delete_workers(role)
            self.create_workers(msgspec.structs.replace(entry.job, replicas=len(ranks), tasks=specs))
            return
        run_sync(self._restart_all(entry))
        for worker_id in entry.worker_ids:
            if command := entry.job.spec(rank_of(worker_id)).cmd:
                run_sync(self._run_command(worker_id, command))

    @staticmethod
    async def _kill_all(role: Role) -> None:
        """End all processes at once: asked to end in order, one that waits for a lost rank would not come to it."""
        await await_all(client.kill("was ended by restart_workers") for client in role.clients.values())

    async def _restart_all(self, role: Role) -> None:
        async with role.growing, self._restarting(role, role.worker_ids), contextlib.AsyncExitStack() as resources:
            deadline = Deadline(self.timeouts.start_s)
            old = role.clients
            await self._kill_all(role)
            ranks = [rank_of(worker_id) for worker_id in old]
            clients = await self._launch(role.job, ranks, [client.place for client in old.values()], deadline, resources)
            pairs = zip(ranks, clients, strict=True)
            await await_all(self._prepare(role.job, rank, client, deadline) for rank, client in pairs)
            with self._book:
                if self._roles.get(role.name) is not role:  # deleted by another thread
                    raise errors.RoleNotFoundError(name=role.name, known=list(self._roles))
                if role.clients is not old:
                    raise not_found(next(each for each in old if each not in role.clients), role)
                role.clients = dict(zip(old, clients, strict=True))
                role.engine_names.clear()
                role.resources.push_async_callback(resources.pop_all().aclose)

    @checked
    def scale(self, role: str, replicas: int) -> list[str]:
        self._require_open("scale")
        entry = self._role(role)
        self._require_scalable(entry, replicas, shrinks=replicas < len(entry.clients))
        return self._with_commands(entry, run_sync(self._scale(entry, lambda: replicas - len(entry.clients))))

    @checked
    def add_workers(self, role: str, count: int) -> list[str]:
        self._require_open("add_workers")
        entry = self._role(role)
        self._require_scalable(entry, count, shrinks=False)
        return self._with_commands(entry, run_sync(self._scale(entry, lambda: count)))

    def _require_scalable(self, role: Role, replicas: int, *, shrinks: bool) -> None:
        if replicas < 1:
            raise errors.InvalidSpecError(role=role.name, field="replicas", value=replicas, expected="1 or more")
        has_many = role.clients and role.target is None and len(role.job.tasks) > 1
        expected = "a job with one spec for all of its replicas" if has_many else ""
        self._require_own(role, "replicas", replicas, shrinks, expected)

    def _require_own(self, role: Role, field: str, value: Any, shrinks: bool, expected: str = "") -> None:
        """Raise InvalidSpecError unless the role's workers are its own, and nobody else's where there are to be fewer."""
        if role.target is not None:
            expected = f"a role with workers of its own; these stand on role {role.target!r}"
        elif not role.clients:
            expected = "a role with workers; this one only holds devices"
        elif not expected and shrinks and (dependents := [each.name for each in self._with_dependents(role.name)[:-1]]):
            expected = f"no fewer workers while {', '.join(dependents)} stand on them; delete these roles first"
        if expected:
            raise errors.InvalidSpecError(role=role.name, field=field, value=value, expected=expected)

    async def _scale(self, role: Role, num_more: Callable[[], int]) -> list[str]:
        async with role.growing:
            count = num_more()
            if count < 0:
                await self._remove(role, role.worker_ids[count:])
            return await self._grow(role, range(role.num_ids, role.num_ids + count)) if count > 0 else []

    def _with_commands(self, role: Role, new: list[str]) -> list[str]:
        """New workers, beside which runs what their spec says."""
        command = role.job.spec(0).cmd
        if not (command and new):
            return new

        async def run_all() -> None:
            await await_all(self._run_command(worker_id, command) for worker_id in new)

        try:
            run_sync(run_all())
        except BaseException:
            self.remove_workers(role.name, new)
            raise
        return new

    async def _grow(self, role: Role, ranks: Sequence[int]) -> list[str]:
        deadline = Deadline(self.timeouts.start_s)
        singles = [self._single(role.job, rank) for rank in ranks]
        async with contextlib.AsyncExitStack() as resources:
            stacks = {each.role: await resources.enter_async_context(contextlib.AsyncExitStack()) for each in singles}
            found = await self._reserve(singles, deadline, stacks)
            places = [found[each.role][0] for each in singles]
            clients = await await_all(
                self._start_rank(role.job, rank, place, deadline, stacks[single.role])
                for rank, place, single in zip(ranks, places, singles, strict=True)
            )
            with self._book:
                if self._roles.get(role.name) is not role:  # deleted by another thread
                    raise errors.RoleNotFoundError(name=role.name, known=list(self._roles))
                role.num_ids = ranks[-1] + 1
                for client, single in zip(clients, singles, strict=True):
                    role.clients = {**role.clients, client.worker_id: client}
                    role.own(client.worker_id, stacks[single.role])
        return [client.worker_id for client in clients]

    @staticmethod
    def _single(job: Job, rank: int) -> Job:
        """What one worker of a job needs, as a job of its own."""
        return msgspec.structs.replace(job, role=f"{job.role}+{rank}", replicas=1, tasks=[job.spec(rank)])

    async def _start_rank(
        self, job: Job, rank: int, place: Place, deadline: Deadline, resources: contextlib.AsyncExitStack
    ) -> WorkerClient:
        (client,) = await self._launch(job, [rank], [place], deadline, resources)
        await self._prepare(job, rank, client, deadline)
        return client

    async def _place_again(
        self, role: Role, worker: WorkerClient, deadline: Deadline, resources: contextlib.AsyncExitStack
    ) -> Place:
        """Where to start a worker again that has ended: at its place, unless that is gone. What is taken otherwise is pushed on
        ``resources``. Raises: as _reserve."""
        return worker.place

    @checked
    def remove_workers(self, role: str, worker_ids: Sequence[str]) -> None:
        if isinstance(worker_ids, str):
            raise refusal("remove_workers", "worker_ids", worker_ids, "Sequence[str]", f"Give a list of ids: [{worker_ids!r}]")
        self._require_open("remove_workers")
        run_sync(self._remove(self._role(role), list(dict.fromkeys(worker_ids))))

    async def _remove(self, role: Role, worker_ids: Sequence[str]) -> None:
        with self._book:
            for worker_id in worker_ids:
                if role.clients and worker_id not in role.clients:
                    raise not_found(worker_id, role)
            self._require_own(role, "worker_ids", list(worker_ids), shrinks=True)
            if len(worker_ids) >= len(role.clients):
                expected = "one worker at least to stay; delete_workers ends a role"
                raise errors.InvalidSpecError(role=role.name, field="worker_ids", value=list(worker_ids), expected=expected)
            doomed = role.part(worker_ids)
        ending = asyncio.ensure_future(self._end(role, doomed))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending  # they are in nobody's book any more, so nobody else would end them
            raise

    async def _end(self, role: Role, doomed: Role) -> None:
        """End workers that a role has let go of, and free what they held."""
        places = doomed.places
        restarts = [role.restarts[worker_id] for worker_id in places if worker_id in role.restarts]
        for restart in restarts:
            restart.cancel()
        if restarts:
            await asyncio.wait(restarts)
        await stop_roles([doomed], False, "remove_workers", self.timeouts.shutdown_s)
        for worker_id, place in places.items():
            await self._give_back(worker_id, place, list(role.places.values()))

    async def _give_back(self, worker_id: str, place: Place, kept: Sequence[Place]) -> None:
        """Free what a worker held that has ended, of a job whose other workers are at ``kept``. Idempotent."""
