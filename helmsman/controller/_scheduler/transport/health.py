"""Health of workers: their own replies, or observations from outside their processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

import msgspec

from helmsman._base.event_loop import Deadline
from helmsman._process.pulse import Seen, read
from helmsman._wire.codec import encode
from helmsman._wire.messages import Request, Verb
from helmsman._wire.wire import Outgoing
from helmsman.api.fan_out import Fanout
from helmsman.api.scheduler import ProcessState, WorkerHealth
from helmsman.controller._scheduler.transport.client import (
    GroupPendingCall,
    WorkerClient,
    request_ids,
)

_PATIENCE_S = 0.5
"""A worker that has not replied within this time is observed from outside."""
_OBSERVED_WITHIN_S = 0.4
"""Limit of an observation. Together with ``_PATIENCE_S`` it stays below the promised one second."""
_MAX_UNANSWERED = 4
"""Most unanswered health requests to a worker whose interpreter runs, for example one that waits in
an engine's ``failure``.
"""
_SILENT_S = 5.0
"""A worker whose interpreter runs gets a new connection if a health request has been unanswered for
this long and no bytes have arrived since.
"""
_STATES: Mapping[str, ProcessState] = {"R": "running", "D": "disk", "T": "stopped", "t": "stopped"}

_decode_health = msgspec.msgpack.Decoder(WorkerHealth).decode


async def ask_health(
    clients: Mapping[str, WorkerClient], limit_s: float, source: str
) -> tuple[dict[str, WorkerHealth], dict[str, BaseException]]:
    """Get the health of all workers at once; runs on the background loop.

    A worker with an unanswered earlier request is asked again only once its interpreter runs. A
    worker that cannot be observed has ``limit_s`` seconds to reply; ``source`` is the setting of
    that limit.

    Returns:
        Health of the workers that replied or could be observed, and the errors of the others.
    """
    asked = Fanout(limit_s, source)
    question = Outgoing(Request(next(request_ids), Verb.HEALTH), encode(()))
    calls: dict[str, GroupPendingCall] = {}

    def ask(worker_ids: Iterable[str]) -> None:
        for worker_id in worker_ids:
            calls[worker_id] = GroupPendingCall(clients[worker_id], question, asked, worker_id)
            calls[worker_id].begin()

    ask(worker_id for worker_id, client in clients.items() if not client.unanswered)
    observed = await _observe(
        {worker_id: client for worker_id, client in clients.items() if client.unanswered}
    )
    found = {
        worker_id: health
        for worker_id, health in observed.items()
        if _is_still_stuck(clients[worker_id], health)
    }
    ask([worker_id for worker_id in clients if worker_id not in found and worker_id not in calls])
    patience_s, deadline = min(_PATIENCE_S, limit_s / 2), Deadline(limit_s)
    while asked.pending and deadline.remaining_s > patience_s:
        # Observe repeatedly, since an observer may still be starting.
        await asked.wait(timeout_s=patience_s)
        observed = await _observe({worker_id: clients[worker_id] for worker_id in asked.pending})
        for worker_id, health in observed.items():
            if asked.pending.pop(worker_id, None) is not None:
                calls[worker_id].withdraw()
                found[worker_id] = health
    await asked.wait()
    found |= {worker_id: _decode_health(answer) for worker_id, answer in asked.results.items()}
    for worker_id, health in found.items():
        clients[worker_id].note(health)
    return found, asked.failures


def _is_still_stuck(client: WorkerClient, observed: WorkerHealth) -> bool:
    """Whether another request is pointless: one is unanswered and the worker still cannot reply."""
    num_unanswered = len(client.unanswered)
    is_alive = (observed.stuck_s or 0.0) < _PATIENCE_S and num_unanswered < _MAX_UNANSWERED
    return num_unanswered > 0 and not is_alive


async def _observe(clients: Mapping[str, WorkerClient]) -> dict[str, WorkerHealth]:
    """Observe workers from outside; omits those that cannot be observed now."""
    observations = await asyncio.gather(
        *(client.transport.observe(_OBSERVED_WITHIN_S) for client in clients.values())
    )
    seen = {
        worker_id: read(observation)
        for worker_id, observation in zip(clients, observations, strict=True)
    }
    for worker_id, each in seen.items():
        if each is not None and each.stuck_s < _PATIENCE_S:
            _doubt(clients[worker_id])
    return {worker_id: as_health(each) for worker_id, each in seen.items() if each is not None}


def _doubt(client: WorkerClient) -> None:
    """Replace a connection that has died silently; its worker could have replied by now."""
    asked = [
        asked_at
        for asked_at in client.unanswered.values()
        if asked_at < time.monotonic() - _SILENT_S
    ]
    if asked:
        client.transport.renew(max(asked))


def as_health(seen: Seen) -> WorkerHealth:
    """The worker's last description of itself, updated from an observation."""
    last = _decode_health(seen.description)
    running = last.running
    running_s = None if last.running_s is None else last.running_s + seen.stuck_s
    if seen.thread_call is not None:
        running, running_s = seen.thread_call if seen.thread_call.name else (None, None)
    async_running = dict(last.async_running)
    if (
        seen.loop_call is not None
        and seen.loop_call.name
        and seen.loop_call.running_s < seen.stuck_s
    ):
        async_running[seen.loop_call.name] = async_running.get(seen.loop_call.name, 0) + 1
    return msgspec.structs.replace(
        last,
        running=running,
        running_s=running_s,
        async_running=async_running,
        cpu_s=seen.cpu_s,
        rss_bytes=seen.rss_bytes,
        ends_in_s=None if last.ends_in_s is None else max(0.0, last.ends_in_s - seen.stuck_s),
        stuck_s=seen.stuck_s,
        process_state=_STATES.get(seen.state, "sleeping"),
    )
