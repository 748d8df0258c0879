"""Whether the ranks of a role can meet at an address, tried before a process group waits there for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping

from helmsman.api import errors
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._transport.client import WorkerClient
from helmsman.rpc_server._wire.messages import Verb

LIMIT_S = 10.0
"""For all ranks together. Where a network drops what it does not route, this is how long it takes to be told."""
_ANSWER_S = 1.0
"""Of it, what a worker has to answer with once it has given up to connect."""


async def probe(role: str, ranks: Mapping[str, WorkerClient], address: str, port: int) -> None:
    """Let rank 0 listen on ``port`` and every rank, itself too, connect to it at ``address``, all at once.

    Args:
        ranks: worker id -> its client, in rank order.
    Raises: RendezvousError; WorkerFailedError or CallTimeoutError when rank 0 does not answer.
    """
    deadline = Deadline(LIMIT_S)
    master_id, master = next(iter(ranks.items()))
    proof = secrets.token_bytes(16)

    async def reach(client: WorkerClient) -> str:
        limit_s = max(deadline.remaining_s, 2 * _ANSWER_S)
        try:
            return str(await client.control(Verb.REACH, address, port, proof, limit_s - _ANSWER_S, limit_s=limit_s))
        except errors.CallError as error:
            return str(error).split("\n", 1)[0]

    try:
        refused = await master.control(Verb.LISTEN, port, proof, LIMIT_S, limit_s=deadline.limit_s)
        reasons = {} if refused else dict(zip(ranks, await asyncio.gather(*map(reach, ranks.values())), strict=True))
    finally:
        with contextlib.suppress(errors.CallError):  # it has ended, or it listens for LIMIT_S at most
            await master.control(Verb.LISTEN, None)
    failed = {worker_id: reason for worker_id, reason in reasons.items() if reason}
    if refused or failed:
        leased = f"port {port} is{'' if str(port) in master.engine_ports else ' not'} leased to it"
        place = "the address of its node" if address == master.node else f"not the address of its node, which is {master.node}"
        raise errors.RendezvousError(
            role=role,
            address=address,
            port=port,
            source=f"rank 0 is {master_id}; {address} is {place}, and {leased}",
            refused=refused,
            reached=[worker_id for worker_id in reasons if worker_id not in failed],
            failed=failed,
        )
