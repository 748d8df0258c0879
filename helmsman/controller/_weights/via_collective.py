"""ViaCollective: the trainer broadcasts weights to a group of instances."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from helmsman._wire.group_keys import group_key
from helmsman.api.errors import EngineCallError, WorkerFailedError
from helmsman.api.weight_exchange import WeightSink, WeightSource
from helmsman.api.weights import CollectiveTarget
from helmsman.controller._groups.call_all import is_communication_error
from helmsman.controller._weights.transport import (
    Outcome,
    Push,
    Transferred,
    WeightTransport,
    devices_of,
    members_of,
)

_GROUP_IS_BROKEN = "weight-sync group has left"
"""Part of the reason why an instance was updated only in part, see WeightGroup."""


class ViaCollective(WeightTransport):
    """Broadcasts weights from the trainer's rank 0 to the instances, device to device.

    Rank 0 and the instances form a process group (gloo on hosts, nccl, hccl). It is created at the
    first push, and again when its members have changed, have joined another group, or an error
    occurred. If a member dies, is late or cannot take part, the weights are sent a second time, to
    the other members. No tokens are decoded during the broadcasts. An instance that is rebuilt
    between two pushes serves after the next one.

    Args:
        timeout: Limit in seconds for which members wait for each other.
    """

    def __init__(self, timeout: float = 120.0) -> None:
        self._timeout_s = timeout
        self._group_id = ""
        self._members: tuple[str, ...] = ()
        self._port = 0

    def check(self, source: WeightSource, sink: WeightSink) -> None:
        if source.scheduler.shares_process:
            raise ValueError(
                f"ViaCollective needs one process per worker, but {type(source.scheduler).__name__}"
                " runs all workers in one; "
                "use ViaMemory"
            )
        sender = source.workers[0]
        shared = [each.id for each in sink.workers if devices_of([each]) & devices_of([sender])]
        if shared:
            raise ValueError(
                f"{shared[0]} shares a device with {sender.id}; a collective needs one device per "
                "member. Use ViaMemory"
            )

    async def transfer(self, push: Push) -> Transferred:
        reachable = push.sink.living_ids(with_suspects=False)
        if not reachable:
            return 0, await push.sink.update({}, push.version, push.left_s, kept=None)
        outcome = await self._broadcast(push, reachable)
        # Without the trainer, a second attempt is impossible.
        has_trainer = not any(
            isinstance(each, WorkerFailedError) for each in outcome.trainer_errors
        )
        if any(map(_is_broken, outcome.errors)) and has_trainer:
            left = [
                id_
                for id_ in await push.sink.answering_ids()
                if not _would_recur(outcome.by_instance.get(id_))
            ]
            if left:
                outcome = await self._broadcast(push, left)
        return outcome.transferred()

    async def _broadcast(self, push: Push, ids: Sequence[str]) -> Outcome:
        source, sink = push.source, push.sink
        if tuple(ids) != self._members or not (source.group_id == sink.group_id == self._group_id):
            self._port = await source.open_store(push.left_s)
            self._group_id = uuid.uuid4().hex
        source.group_id = sink.group_id = self._group_id
        # Reset until success: after an error or interrupt, members may be at different broadcasts.
        self._members = ()
        place = CollectiveTarget(
            version=push.version,
            group_id=self._group_id,
            address=source.workers[0].ip,
            port=self._port,
            key=group_key(
                self._group_id, [worker.ip for worker in (*source.workers[:1], *sink.workers)]
            ),
            rank=0,
            world_size=1 + len(ids),
            timeout_s=max(0.1, min(self._timeout_s, push.left_s)),
        )
        weights = {
            id_: msgspec.structs.replace(place, rank=rank) for rank, id_ in enumerate(ids, 1)
        }
        # A live member leaves by itself. Neither gloo nor NCCL notices a dead one in time.
        outcome = await push.stream(place, weights, kept=None, left_out_on=WorkerFailedError)
        if not outcome.errors:
            self._members = tuple(ids)
        return outcome


def _is_broken(error: Exception) -> bool:
    """Return whether a group member has died or is late, so that others may lack the weights."""
    return any(
        isinstance(each, WorkerFailedError)
        or (
            isinstance(each, EngineCallError)
            and (
                each.remote_type == "ConnectionError"
                or is_communication_error(each)
                or _GROUP_IS_BROKEN in each.remote_message
            )
        )
        for each in members_of(error)
    )


def _would_recur(error: Exception | None) -> bool:
    """Return whether an instance's failure is its own, and so would recur in a second attempt."""
    return isinstance(error, EngineCallError) and not _is_broken(error)
