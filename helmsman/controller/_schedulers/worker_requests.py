"""Requests to workers that only one method of a scheduler needs: a trial of a rendezvous, and a
fault that they inflict.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping

from helmsman.api import errors
from helmsman.api.errors import CallError, CallTimeoutError, HelmsmanError, WorkerFailedError
from helmsman.api.faults import DropNode, Fault, Hang, Injection, Kill, Slow
from helmsman.controller._aio.event_loop import Deadline, run_in_executor
from helmsman.controller._placement.placement import Placement
from helmsman.controller._transport.client import WorkerClient
from helmsman.rpc_server._wire.messages import FaultCommand, Verb

LIMIT_S = 10.0
"""For all ranks together. Where a network drops what it does not route, this is how long it takes
to be told.
"""
_ANSWER_S = 1.0
"""Of it, what a worker has to answer with once it has given up to connect."""


async def probe(role: str, ranks: Mapping[str, WorkerClient], address: str, port: int) -> None:
    """Let rank 0 listen on ``port`` and every rank, in order, itself too, connect to it at
    ``address``, all at once. Raises: RendezvousError; WorkerFailedError or CallTimeoutError when
    rank 0 does not answer.
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
            # it has ended, or it listens for LIMIT_S at most
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
    """Inflict a fault now; returns what became of it at each worker that it concerns, of all
    ``clients`` of the run.

    ``why_node_stays`` tells why the node at a place cannot be dropped itself; '' when it can. It
    may block.
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
    """Why a worker cannot be told anything. One that hangs would do it late, when nobody expects it
    any more.
    """
    try:
        await client.control(Verb.HEALTH)
    except WorkerFailedError as error:
        return _injection(client, False, f"it had ended before: it {error.cause}")
    except CallTimeoutError as error:
        return _injection(
            client,
            False,
            f"it was not told, since it gave no sign of life within {error.limit_s:g} s",
        )
    except CallError as error:
        return _injection(client, False, f"it was not told: {error}")
    return None


async def _tell(client: WorkerClient, command: FaultCommand, more: str = "") -> Injection:
    what = command.describe() + more
    try:
        ended = await client.control(Verb.FAULT, command)
    except (WorkerFailedError, CallTimeoutError):
        # It was there just now: its answer may be lost with it, or wait until it goes on.
        return _injection(client, True, what)
    except HelmsmanError as error:
        return _injection(client, False, f"it could not: {error}")
    return _injection(client, True, what + (f", no longer {ended}" if ended else ""))


def _injection(client: WorkerClient, done: bool, outcome: str) -> Injection:
    return Injection(
        worker_id=client.worker_id, pid=client.pid, node=client.node, done=done, outcome=outcome
    )
