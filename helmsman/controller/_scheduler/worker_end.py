"""The end of workers: their engines first, then their processes, then their places.

``WorkerClient.kill`` ends a single one. Without the script, workers end by themselves
(``_process/driver_watch.py``), and a guardian ends their children (``_process/guardian.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import NamedTuple

from helmsman._base.event_loop import Deadline
from helmsman._wire.messages import Verb
from helmsman.api import errors
from helmsman.controller._scheduler.roles import Role
from helmsman.controller._scheduler.transport.client import WorkerClient

log = logging.getLogger(__name__)

_WORKER_SHARE = 0.8
"""Part of a destroy request's limit that the worker waits for async methods, so that its reply
arrives within the limit.
"""


async def stop_roles(
    doomed: list[Role], reverse_order: bool, operation: str, limit_s: float
) -> None:
    """Destroy the engines of all roles at once, end their processes and free their resources.

    One deadline covers everything.

    Raises:
        ShutdownIncompleteError: Processes are still running, or engines in workers of other roles
            have not been destroyed.
    """
    deadline = Deadline(limit_s)
    late = [
        each
        for found in await asyncio.gather(*(_end_engines(role, deadline) for role in doomed))
        for each in found
    ]
    hung = {each.client for each in late}  # a shutdown request may hang as well
    ending = {client for role in doomed if not role.reuses for client in role.clients.values()}
    outliving = [each for each in late if each.client not in ending]
    remaining: list[str] = []
    for role in doomed:
        if role.reuses:
            continue
        clients = list(role.clients.values())
        waves = [clients[1:], clients[:1]] if reverse_order else [clients]
        for wave in waves:
            await asyncio.gather(
                *(_ask_to_end(client, deadline) for client in wave if client not in hung)
            )
            cause = f"was ended by {operation}"
            outcomes = await asyncio.gather(
                *(client.kill(cause) for client in wave), return_exceptions=True
            )
            for outcome in outcomes:
                if isinstance(outcome, errors.ShutdownIncompleteError):
                    remaining += outcome.remaining
                elif outcome is not None:
                    raise outcome
        with contextlib.suppress(errors.ShutdownIncompleteError):
            # the process is already listed in remaining
            await role.free()
    commands = []
    if remaining:
        pids = [part.split()[1] for part in remaining if part.startswith("pid ")]
        commands.append(f"kill -9 {' '.join(pids)}")
    targets = {each.client.worker_id.rpartition("/")[0] for each in outliving}
    commands += [f"scheduler.delete_workers({target!r})" for target in sorted(targets)]
    if commands:
        raise errors.ShutdownIncompleteError(
            operation=operation,
            remaining=[*remaining, *(each.describe() for each in outliving)],
            elapsed_s=deadline.elapsed_s,
            command="; ".join(commands),
        )


class _LateEngines(NamedTuple):
    """Engines of one worker whose ``destroy`` did not end in time; it still runs, or will."""

    client: WorkerClient
    worker_id: str
    names: Sequence[str]

    def describe(self) -> str:
        """Name the engines and their worker, as a part of ShutdownIncompleteError."""
        return (
            f"engine(s) {', '.join(self.names)} of {self.worker_id}, whose destroy has not ended "
            f"in worker {self.client.worker_id} (pid {self.client.pid} on {self.client.node})"
        )


async def _end_engines(role: Role, deadline: Deadline) -> list[_LateEngines]:
    """Destroy the engines of a role; returns those that were not destroyed in time."""
    late: list[_LateEngines] = []

    async def end(worker_id: str, client: WorkerClient) -> None:
        names = sorted(role.engine_names.get(worker_id, ())) if role.reuses else None
        if names == []:
            return
        # Half of the time, so that a hung engine leaves the rest for ending its process.
        limit_s = max(deadline.remaining_s / 2, 0.001)
        try:
            problems, unfinished = await client.control(
                Verb.DESTROY, names, _WORKER_SHARE * limit_s, limit_s=limit_s
            )
        except errors.CallTimeoutError:
            late.append(_LateEngines(client, worker_id, names or []))
        except errors.CallError:
            return  # it is dead
        else:
            if unfinished:
                late.append(_LateEngines(client, worker_id, unfinished))
            for problem in problems:
                log.warning("%s: %s", worker_id, problem)

    await asyncio.gather(*(end(*pair) for pair in role.clients.items()))
    return late


async def _ask_to_end(client: WorkerClient, deadline: Deadline) -> None:
    with contextlib.suppress(errors.CallError):  # dead or hung; it is killed next
        await client.shut_down(max(deadline.remaining_s / 2, 0.001))
