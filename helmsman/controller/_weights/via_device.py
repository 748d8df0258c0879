"""ViaDevice: trainer ranks hand weights to the rollout processes on their devices."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence

import msgspec

from helmsman.api.errors import (
    EngineCallError,
    GroupCallError,
    HandleLostError,
    HelmsmanError,
)
from helmsman.api.scheduler import ResultHandle
from helmsman.api.weight_exchange import WeightSink, WeightSource
from helmsman.api.weights import DeviceTarget, MemoryTarget
from helmsman.api.workers import Worker
from helmsman.controller._weights.transport import (
    Push,
    Transferred,
    ViaMemory,
    WeightTransport,
    devices_of,
    unsupported,
)

log = logging.getLogger(__name__)


class ViaDevice(WeightTransport):
    """Hands weights to instances on the trainer's devices, through two buffers per device.

    Each trainer rank gathers the weights bucket by bucket and fills one buffer while the process on
    its device loads the other. Nothing is copied to the host. An instance of several ranks needs a
    trainer rank on each of its devices. On nodes without devices the buffers are on the host.

    Where an instance is on other devices, or the devices' memory cannot be shared between
    processes, the push falls back to ViaMemory and logs the reason. An instance that is rebuilt
    between two pushes receives the weights by ViaMemory, if the trainer still has them.

    Args:
        timeout: Limit in seconds for which a trainer rank waits for an instance, before it
            continues without it; an instance waits twice as long.
    """

    def __init__(self, timeout: float = 120.0) -> None:
        self._timeout_s = timeout
        self._can_share = True
        self.fallback_reason = ""
        """Why the last push went by ViaMemory; '' if it did not."""

    def check(self, source: WeightSource, sink: WeightSink) -> None:
        if source.scheduler.shares_process:
            raise ValueError(
                f"ViaDevice needs one process per worker, but {type(source.scheduler).__name__} "
                "runs all workers in one; use ViaMemory"
            )
        _ranks_beside(source.workers, sink.workers)

    async def transfer(self, push: Push) -> Transferred:
        source, sink = push.source, push.sink
        ids = sink.living_ids(with_suspects=False)
        if not ids:
            return 0, await sink.update({}, push.version, push.left_s, kept=None)
        reason = self.fallback_reason
        if self._can_share:
            try:
                ranks = _ranks_beside(source.workers, [w for w in sink.workers if w.id in ids])
            except ValueError as error:
                reason = str(error)
            else:
                try:
                    done = await self._hand_over(push, ranks)
                except (EngineCallError, GroupCallError) as error:
                    if (unable := unsupported(error)) is None:
                        raise
                    reason, self._can_share = str(unable).split("\n", 1)[0], False
                else:
                    self.fallback_reason = ""
                    return done
        if reason != self.fallback_reason:
            self.fallback_reason = reason
            log.warning(
                "role %s sends weights to role %s by ViaMemory: %s", source.role, sink.role, reason
            )
        return await ViaMemory().transfer(push)

    async def _hand_over(self, push: Push, ranks: Mapping[str, Sequence[int]]) -> Transferred:
        source = push.source
        sockets = await source.open_sockets(push.left_s)
        receivers: list[list[str]] = [[] for _ in sockets]
        for id_, its_ranks in ranks.items():
            for rank in its_ranks:
                receivers[rank].append(id_)
        place = DeviceTarget(
            version=push.version,
            key=uuid.uuid4().hex,
            sockets=tuple(sockets),
            receivers=tuple(map(tuple, receivers)),
            timeout_s=max(0.1, min(self._timeout_s, push.left_s)),
        )
        weights = {
            id_: msgspec.structs.replace(
                place,
                sockets=tuple(sockets[rank] for rank in its_ranks),
                receivers=(),
                receiver=id_,
            )
            for id_, its_ranks in ranks.items()
        }

        async def from_memory() -> ResultHandle:
            target = MemoryTarget(version=push.version)
            try:
                handle: ResultHandle = await source.publish(target, push.form, None)
            except HelmsmanError as error:
                raise HandleLostError(
                    worker_id=f"role {source.role}",
                    handle_id=f"weights of version {push.version}",
                    reason=str(error).split("\n", 1)[0],
                ) from error
            return handle

        outcome = await push.stream(place, weights, kept=from_memory, left_out_on=BaseException)
        for each in outcome.errors:
            if unsupported(each):
                raise each
        return outcome.transferred()


class ByPlacement(WeightTransport):
    """ViaDevice if the two roles share devices at the time of a push, else ViaMemory."""

    def __init__(self) -> None:
        self._via_device = ViaDevice()

    async def transfer(self, push: Push) -> Transferred:
        source, sink = push.source, push.sink
        shared = devices_of(source.workers) & devices_of(sink.workers)
        if shared and not source.scheduler.shares_process:
            return await self._via_device.transfer(push)
        return await ViaMemory().transfer(push)


def _ranks_beside(trainers: Sequence[Worker], instances: Sequence[Worker]) -> dict[str, list[int]]:
    """Return the trainer rank on each device of each instance, by the instance's id.

    Instances without devices are divided among the ranks of their node.

    Raises:
        ValueError: A device has no trainer rank.
    """
    num_served = [0] * len(trainers)
    found: dict[str, list[int]] = {}
    for instance in instances:
        found[instance.id] = []
        for device in [[str(each)] for each in instance.devices] or [[]]:
            beside = [
                rank
                for rank, trainer in enumerate(trainers)
                if trainer.node_id == instance.node_id and list(map(str, trainer.devices)) == device
            ]
            if not beside:
                where = f"device {device[0]}" if device else "no device"
                raise ValueError(
                    f"{instance.id} is on {where} of node {instance.node_id}; expected a "
                    "trainer rank there. Use ViaMemory"
                )
            rank = min(beside, key=num_served.__getitem__)
            num_served[rank] += 1
            found[instance.id].append(rank)
    return found
