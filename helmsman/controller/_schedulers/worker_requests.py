"""Scheduler operations on workers: questions to all, the rendezvous probe and fault injection."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from helmsman.api import errors
from helmsman.api.errors import CallError, CallTimeoutError, HelmsmanError, WorkerFailedError
from helmsman.api.faults import DropNode, Fault, Hang, Injection, Kill, Slow
from helmsman.controller._aio.event_loop import Deadline, run_in_executor
from helmsman.controller._placement.placement import Placement
from helmsman.controller._transport.client import WorkerClient
from helmsman.rpc_server._wire.messages import FaultCommand, Verb

LIMIT_S = 10.0
"""Limit of a probe for all ranks together; a network that drops packets uses it up."""
_ANSWER_S = 1.0
"""Part of the limit reserved for a worker's reply after its connection attempt has failed."""


async def ask_all(
    clients: Mapping[str, WorkerClient], verb: Verb, limit_s: float | None = None
) -> dict[str, Any]:
    """Send a control verb to workers; returns their answers or errors by worker id."""
    asked = (client.control(verb, limit_s=limit_s) for client in clients.values())
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return dict(zip(clients, answers, strict=True))


async def probe(role: str, ranks: Mapping[str, WorkerClient], address: str, port: int) -> None:
    """Check that every rank, rank 0 included, can connect to rank 0 at ``address`` and ``port``.

    Rank 0 listens on the port; all ranks connect at once.

    Raises:
        RendezvousError: Rank 0 could not listen, or ranks could not connect.
        WorkerFailedError: Rank 0 has died.
        CallTimeoutError: Rank 0 did not reply.
    """
    deadline = Deadline(LIMIT_S)
    master_id, master = next(iter(ranks.items()))
    proof = secrets.token_bytes(16)

    async def reach(client: WorkerClient) -> str:
        limit_s = max(deadline.remaining_s, 2 * _ANSWER_S)
        try:
            return str(
                await client.control(
                    Verb.CHECK_CONNECT, address, port, proof, limit_s - _ANSWER_S, limit_s=limit_s
                )
            )
        except errors.CallError as error:
            return str(error).split("\n", 1)[0]

    try:
        refused = await master.control(
            Verb.PROBE_LISTEN, port, proof, LIMIT_S, limit_s=deadline.limit_s
        )
        reasons = (
            {}
            if refused
            else dict(zip(ranks, await asyncio.gather(*map(reach, ranks.values())), strict=True))
        )
    finally:
        with contextlib.suppress(errors.CallError):
            # it has died, or stops listening after LIMIT_S
            await master.control(Verb.PROBE_LISTEN, None)
    failed = {worker_id: reason for worker_id, reason in reasons.items() if reason}
    if refused or failed:
        leased = f"port {port} is{'' if str(port) in master.engine_ports else ' not'} leased to it"
        place = (
            "the address of its node"
            if address == master.node
            else f"not the address of its node, which is {master.node}"
        )
        raise errors.RendezvousError(
            role=role,
            address=address,
            port=port,
            source=f"rank 0 is {master_id}; {address} is {place}, and {leased}",
            refused=refused,
            reached=[worker_id for worker_id in reasons if worker_id not in failed],
            failed=failed,
        )


async def inject(
    fault: Fault,
    target: WorkerClient,
    clients: Iterable[WorkerClient],
    why_node_stays: Callable[[Placement], str],
) -> list[Injection]:
    """Inject a fault now; returns the outcome at each affected worker among ``clients``.

    ``why_node_stays`` returns the reason why the node of a place cannot be dropped, or ''. It may
    block.
    """
    if not isinstance(fault, DropNode):
        return [await _health(target) or await _tell(target, _command(fault))]
    why = await run_in_executor(why_node_stays, target.place)
    there = {client: None for client in clients if client.place.node_id == target.place.node_id}
    found = await asyncio.gather(*(_health(client) for client in there))
    living = [client for client, problem in zip(there, found, strict=True) if problem is None]
    node = f"; the node itself stays: {why}" if why else "; its raylet was killed, too"
    inflicted = await asyncio.gather(
        *(
            _tell(
                client, FaultCommand(kind="kill", ends_raylet=not why and client is living[0]), node
            )
            for client in living
        )
    )
    spared = [problem for problem in found if problem is not None]
    return [*inflicted, *spared]


def _command(fault: Kill | Hang | Slow) -> FaultCommand:
    if isinstance(fault, Kill):
        return FaultCommand(kind="kill")
    factor = fault.factor if isinstance(fault, Slow) else math.inf
    return FaultCommand(
        kind="stop", factor=factor, seconds=math.inf if fault.seconds is None else fault.seconds
    )


async def _health(client: WorkerClient) -> Injection | None:
    """Reason why a worker cannot take a fault; None if it can.

    A hung worker is skipped, since it would apply the fault late, at an unexpected time.
    """
    try:
        await client.control(Verb.HEALTH)
    except WorkerFailedError as error:
        return _injection(client, False, f"it had already ended: it {error.cause}")
    except CallTimeoutError as error:
        return _injection(
            client,
            False,
            f"it did not respond within {error.limit_s:g} s, so the fault was not sent",
        )
    except CallError as error:
        return _injection(client, False, f"the fault was not sent: {error}")
    return None


async def _tell(client: WorkerClient, command: FaultCommand, more: str = "") -> Injection:
    what = command.describe() + more
    try:
        ended = await client.control(Verb.FAULT, command)
    except (WorkerFailedError, CallTimeoutError):
        # It has just replied to a health check, so the fault has hit: the reply is lost if it was
        # killed, and late if it is stopped.
        return _injection(client, True, what)
    except HelmsmanError as error:
        return _injection(client, False, f"the fault failed: {error}")
    return _injection(client, True, what + (f", no longer {ended}" if ended else ""))


def _injection(client: WorkerClient, done: bool, outcome: str) -> Injection:
    return Injection(
        worker_id=client.worker_id, pid=client.pid, node=client.node, done=done, outcome=outcome
    )
