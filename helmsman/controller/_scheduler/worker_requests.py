"""Scheduler operations on workers: questions to all and the rendezvous probe."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from typing import Any

from helmsman._base.event_loop import Deadline
from helmsman._wire.messages import Verb
from helmsman.api import errors
from helmsman.controller._scheduler.transport.client import WorkerClient

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
