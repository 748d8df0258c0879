"""A role that runs, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec

from helmsman.api import errors
from helmsman.api.plan import PlannedInstance, PlannedRole, PlannedWorker
from helmsman.api.scheduler import Job
from helmsman.controller.client import WorkerClient
from helmsman.controller.deadline import Deadline
from helmsman.controller.places import Place
from helmsman.rpc_server.messages import Verb

log = logging.getLogger(__name__)


class Role:
    """A role that runs: its workers, and what has to be undone when it goes. One that is only reserved has places alone."""

    def __init__(
        self,
        job: Job,
        clients: list[WorkerClient],
        resources: contextlib.AsyncExitStack,
        *,
        reuses: bool = False,
        places: Sequence[Place] | None = None,
    ) -> None:
        self.job = job
        self.clients = clients
        self.places = [client.place for client in clients] if places is None else list(places)
        """Where its replicas are, in rank order."""
        self.resources = resources
        self.reuses = reuses
        """Whether the workers belong to another role (colocation without fork)."""
        self.engine_names: dict[str, set[str]] = {}
        """Engines created through this role, by worker id."""
        self.restarting = asyncio.Lock()
        """Held while one of its workers is restarted, or their number changes."""
        self._grown: dict[int, contextlib.AsyncExitStack] = {}
        """What has to be undone for a rank alone, of ranks that came later."""

    def grow(self, job: Job, clients: Sequence[WorkerClient], resources: Sequence[contextlib.AsyncExitStack]) -> None:
        """Have more workers, each with what has to be undone when it goes."""
        first = len(self.clients)
        self.job = job
        self.clients = [*self.clients, *clients]
        self.places = [*self.places, *(client.place for client in clients)]
        for rank, stack in enumerate(resources, start=first):
            self._grown[rank] = stack
            self.resources.push_async_callback(stack.aclose)

    def shrink(self, replicas: int) -> Role:
        """Have fewer workers; returns the others, as a role that is to be stopped."""
        own = contextlib.AsyncExitStack()
        for rank in range(replicas, len(self.clients)):
            if (stack := self._grown.pop(rank, None)) is not None:
                own.push_async_callback(stack.aclose)
        doomed = Role(self.job, self.clients[replicas:], own, places=self.places[replicas:])
        self.job = msgspec.structs.replace(self.job, replicas=replicas)
        self.clients, self.places = self.clients[:replicas], self.places[:replicas]
        for rank in range(replicas, replicas + len(doomed.clients)):
            self.engine_names.pop(f"{self.name}/{rank}", None)
        return doomed

    @property
    def name(self) -> str:
        """The role."""
        return self.job.role

    @property
    def worker_ids(self) -> list[str]:
        """Ids of its workers in rank order."""
        return [f"{self.name}/{index}" for index in range(len(self.clients))]

    @property
    def workers(self) -> list[PlannedWorker]:
        """Its replicas as a plan has them, in rank order."""
        return [place.as_planned(f"{self.name}/{index}") for index, place in enumerate(self.places)]

    @property
    def target(self) -> str | None:
        """The role that it is colocated with."""
        return self.job.scheduling_strategy.target

    def as_planned(self) -> PlannedRole:
        """The role as a plan has it; what its placement groups hold is counted by the cluster itself."""
        return PlannedRole(
            role=self.name,
            accelerator=self.places[0].accelerator,
            target=self.target,
            instances=(PlannedInstance(index=0, bundles=(), workers=tuple(self.workers)),),
        )


async def stop_roles(doomed: list[Role], reverse_order: bool, operation: str, limit_s: float) -> None:
    """Destroy the engines of all roles at once, end the processes, free the resources; all under one deadline."""
    deadline = Deadline(limit_s)
    hung: set[WorkerClient] = set().union(*await asyncio.gather(*(_end_engines(role, deadline) for role in doomed)))
    remaining: list[str] = []
    for role in doomed:
        if role.reuses:
            continue
        waves = [role.clients[1:], role.clients[:1]] if reverse_order else [role.clients]
        for wave in waves:
            await asyncio.gather(*(_ask_to_end(client, deadline) for client in wave if client not in hung))
            outcomes = await asyncio.gather(*(client.transport.kill() for client in wave), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, errors.ShutdownIncompleteError):
                    remaining += outcome.remaining
                elif outcome is not None:
                    raise outcome
        with contextlib.suppress(errors.ShutdownIncompleteError):  # of a process that is counted above
            await role.resources.aclose()
    if remaining:
        raise errors.ShutdownIncompleteError(
            operation=operation,
            remaining=remaining,
            elapsed_s=deadline.elapsed_s,
            command="kill -9 " + " ".join(part.split()[1] for part in remaining if part.startswith("pid ")),
        )


async def _end_engines(role: Role, deadline: Deadline) -> set[WorkerClient]:
    """Destroy the engines of a role; returns the workers that did not come to it."""
    hung: set[WorkerClient] = set()

    async def end(worker_id: str, client: WorkerClient) -> None:
        names = sorted(role.engine_names.get(worker_id, ())) if role.reuses else None
        if names == []:
            return
        # Half of the time: a hung engine must leave enough to end its process in order.
        try:
            problems = await client.control(Verb.DESTROY, names, limit_s=max(deadline.remaining_s / 2, 0.001))
        except errors.CallTimeoutError:
            hung.add(client)  # asking it to end would be in vain, too
        except errors.CallError:
            return  # it is dead
        else:
            for problem in problems:
                log.warning("%s: %s", worker_id, problem)

    await asyncio.gather(*(end(*pair) for pair in zip(role.worker_ids, role.clients, strict=True)))
    return hung


async def _ask_to_end(client: WorkerClient, deadline: Deadline) -> None:
    with contextlib.suppress(errors.CallError):  # dead already, or hung: it is killed next
        await client.shut_down(max(deadline.remaining_s / 2, 0.001))
