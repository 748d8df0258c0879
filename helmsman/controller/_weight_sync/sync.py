"""WeightSync: brings a trainer's weights to the instances of a rollout, one call to each, in one of
several ways.
"""

from __future__ import annotations

import abc
import asyncio
import os
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from helmsman.api.errors import EngineCallError, GroupCallError, WorkerFailedError
from helmsman.api.generation import InFlight
from helmsman.api.scheduler import ResultHandle
from helmsman.api.weight_exchange import ReceivesWeights, SendsWeights, WeightSink, WeightSource
from helmsman.api.weights import (
    CollectiveTarget,
    DiskTarget,
    MemoryTarget,
    WeightFormat,
    WeightsOnDisk,
)
from helmsman.controller._aio.event_loop import run_async
from helmsman.controller._roles.call_all import is_communication_error, release
from helmsman.controller._roles.role_controller import blocking
from helmsman.controller._validation.argument_types import checked


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    num_bytes: int
    """That left the trainer, once, however many instances there are."""
    seconds: float
    updated: tuple[str, ...]
    failed: dict[str, str]
    """Instance id -> why it does not."""


class WeightSync:
    """The way of one trainer's weights to one rollout's instances.

    Args:
        way: ViaMemory (the default), ViaCollective or ViaDisk.
        form: type, names, buckets and checksums of what is sent.
        in_flight: what becomes of requests that are in flight: they ``continue`` by the new
            weights, each token with the version that made it; ``finish`` by the old ones first,
            while nothing new starts; or are taken back (``recall``) with the tokens they have, and
            continued by the new weights on any instance.

    An instance whose sync fails gets no requests until one succeeds, and those it has go on
    elsewhere.
    """

    def __init__(
        self,
        trainer: SendsWeights,
        rollout: ReceivesWeights,
        way: WeightTransport | None = None,
        *,
        form: WeightFormat | None = None,
        in_flight: InFlight = "keep",
    ) -> None:
        self._source, self._sink = source, sink = trainer.weight_source, rollout.weight_sink
        if source.scheduler is not sink.scheduler:
            raise ValueError(
                f"role {source.role!r} and role {sink.role!r} run on two schedulers, and weights "
                "go between workers of one"
            )
        self._transport, self._form, self._in_flight = (
            way or ViaMemory(),
            form or WeightFormat(),
            in_flight,
        )
        self._transport.check(source, sink)

    @checked
    async def async_push(self, timeout: float | None = None) -> SyncReport:
        """Have every living instance serve the trainer's weights.

        Args:
            timeout: seconds for all of it; the scheduler's ``timeouts.call_s`` when None.
        Raises: what the trainer raised, before any instance has changed unless it was in the middle
            of broadcasts; ValueError for a version below the last one's; RequestsInFlightError when
            requests that had to end or come back have not; else as
            RolloutController.update_weights.
        """
        return await run_async(self._push(timeout))

    push = blocking(async_push)

    async def _push(self, timeout: float | None) -> SyncReport:
        started = time.monotonic()
        deadline = started + (
            self._source.scheduler.timeouts.call_s if timeout is None else timeout
        )
        async with self._sink.hold(self._in_flight, deadline - time.monotonic()):
            version = await self._source.version(deadline - time.monotonic())
            num_bytes, failures = await self._transport.transfer(
                self._source, self._sink, self._form, version, deadline
            )
            updated, failed = self._sink.served_by(failures)
        return SyncReport(
            version=version,
            num_bytes=num_bytes,
            seconds=time.monotonic() - started,
            updated=updated,
            failed=failed,
        )


class WeightTransport(abc.ABC):
    """Moves weights from a trainer to the instances of a rollout."""

    def check(self, source: WeightSource, sink: WeightSink) -> None:
        """Raise ValueError if this transport cannot connect the two. By default it always can."""
        return

    @abc.abstractmethod
    async def transfer(
        self,
        source: WeightSource,
        sink: WeightSink,
        form: WeightFormat,
        version: int,
        deadline: float,
    ) -> tuple[int, Mapping[str, Exception]]:
        """Transfer the weights of one version.

        Args:
            source: The trainer.
            sink: The rollout.
            form: Dtype, names and bucket size of the weights.
            version: Weight version that the trainer must have.
            deadline: Time on the clock of ``time.monotonic`` until which the transfer may take.

        Returns:
            Bytes that left the trainer, and the error of each instance that did not receive them.
        """


async def _read_by_all(
    stored: ResultHandle | WeightsOnDisk,
    source: WeightSource,
    sink: WeightSink,
    version: int,
    deadline: float,
) -> tuple[int, Mapping[str, Exception]]:
    """Have each instance read weights that the trainer has stored; returns as ``transfer``."""
    try:
        weights = dict.fromkeys(sink.living_ids(), stored)
        failures = await sink.update(weights, version, deadline - time.monotonic(), kept=stored)
    finally:
        if isinstance(stored, ResultHandle) and not sink.keeps(stored):
            await asyncio.to_thread(release, source.scheduler, stored)
    return stored.nbytes if isinstance(stored, ResultHandle) else stored.num_bytes, failures


class ViaMemory(WeightTransport):
    """Worker to worker: once into shared memory of the trainer's node, or Ray's object store, from
    which each instance reads them; instances of one other node read one copy of it. Rank 0 holds
    all of them on its host.
    """

    async def transfer(
        self,
        source: WeightSource,
        sink: WeightSink,
        form: WeightFormat,
        version: int,
        deadline: float,
    ) -> tuple[int, Mapping[str, Exception]]:
        target = MemoryTarget(version=version)
        stored = await source.publish(target, form, deadline - time.monotonic())
        return await _read_by_all(stored, source, sink, version, deadline)


class ViaExport(WeightTransport):
    """As ViaMemory, for trainers without publish_weights: all parameters as they are, by
    ``export_weights``.
    """

    async def transfer(
        self,
        source: WeightSource,
        sink: WeightSink,
        form: WeightFormat,
        version: int,
        deadline: float,
    ) -> tuple[int, Mapping[str, Exception]]:
        stored = await source.export(version, deadline - time.monotonic())
        return await _read_by_all(stored, source, sink, version, deadline)


class ViaDisk(WeightTransport):
    """Files of safetensors in a folder that all workers reach. A version's folder appears when it
    is complete, in the layout that Hugging Face reads, so that other programs can take weights from
    it, too.

    Args:
        folder: the same on all nodes; a relative one is below the script's own current folder.
        num_kept: versions that stay.
    """

    def __init__(self, folder: str, num_kept: int = 2) -> None:
        if num_kept < 1:
            raise ValueError(f"num_kept is {num_kept}; expected 1 or more")
        self._folder, self._num_kept = os.path.abspath(folder), num_kept

    async def transfer(
        self,
        source: WeightSource,
        sink: WeightSink,
        form: WeightFormat,
        version: int,
        deadline: float,
    ) -> tuple[int, Mapping[str, Exception]]:
        target = DiskTarget(version=version, folder=self._folder, num_kept=self._num_kept)
        stored = await source.publish(target, form, deadline - time.monotonic())
        return await _read_by_all(stored, source, sink, version, deadline)


class ViaCollective(WeightTransport):
    """Broadcasts of a process group (gloo on hosts, nccl, hccl) of the trainer's rank 0 and the
    instances, device to device.

    Nothing is decoded while they last. The group is made at the first sync, and again when its
    members have changed, one of them has been in another since, or something went wrong. When a
    member dies, is late or cannot take part, the weights are sent once more to those that can. An
    instance that is rebuilt between two syncs serves after the next one.

    Args:
        timeout: seconds that members wait for each other.
    """

    def __init__(self, timeout: float = 120.0) -> None:
        self._timeout_s = timeout
        self._group_id = ""
        self._members: tuple[str, ...] = ()
        self._port = 0

    def check(self, source: WeightSource, sink: WeightSink) -> None:
        if source.scheduler.shares_process:
            raise ValueError(
                "ViaCollective needs workers in processes of their own, which "
                f"{type(source.scheduler).__name__} has not; "
                "use ViaMemory"
            )
        sender = source.workers[0]
        shared = [
            each.id
            for each in sink.workers
            if each.node_id == sender.node_id
            and set(map(str, each.devices)) & set(map(str, sender.devices))
        ]
        if shared:
            raise ValueError(
                f"{shared[0]} has a device of {sender.id}, and a collective takes one member for "
                "each device; use ViaMemory"
            )

    async def transfer(
        self,
        source: WeightSource,
        sink: WeightSink,
        form: WeightFormat,
        version: int,
        deadline: float,
    ) -> tuple[int, Mapping[str, Exception]]:
        reachable = sink.living_ids(with_suspects=False)
        if not reachable:
            return 0, await sink.update({}, version, deadline - time.monotonic(), kept=None)
        outcome = await self._broadcast(source, sink, reachable, form, version, deadline)
        if any(map(_is_broken, outcome.errors)) and not outcome.has_lost_trainer:
            left = [id_ for id_ in await sink.answering_ids() if id_ not in outcome.unable]
            if left:
                outcome = await self._broadcast(source, sink, left, form, version, deadline)
        if outcome.errors and (outcome.num_bytes is None or outcome.failures is None):
            raise outcome.errors[0]
        return outcome.num_bytes or 0, outcome.failures or {}

    async def _broadcast(
        self,
        source: WeightSource,
        sink: WeightSink,
        ids: Sequence[str],
        form: WeightFormat,
        version: int,
        deadline: float,
    ) -> _Outcome:
        if tuple(ids) != self._members or not (source.group_id == sink.group_id == self._group_id):
            self._port = await source.open_store(deadline - time.monotonic())
            self._group_id = uuid.uuid4().hex
        source.group_id = sink.group_id = self._group_id
        # after an error or an interrupt it is not known where in the group's broadcasts each of
        # them is
        self._members = ()
        place = CollectiveTarget(
            version=version,
            group_id=self._group_id,
            address=source.workers[0].ip,
            port=self._port,
            rank=0,
            world_size=1 + len(ids),
            timeout_s=max(0.1, min(self._timeout_s, deadline - time.monotonic())),
        )
        weights = {
            id_: msgspec.structs.replace(place, rank=rank) for rank, id_ in enumerate(ids, 1)
        }
        sending = asyncio.ensure_future(source.publish(place, form, deadline - time.monotonic()))
        sides: tuple[Any, Any] = await asyncio.gather(
            sending,
            sink.update(weights, version, deadline - time.monotonic(), kept=None, sending=sending),
            return_exceptions=True,
        )
        outcome = _Outcome(*sides)
        if not outcome.errors:
            self._members = tuple(ids)
        return outcome


class _Outcome:
    """How a transfer by broadcasts ended, on both sides."""

    def __init__(self, sent: Any, received: Any) -> None:
        for side in (sent, received):
            if isinstance(side, BaseException) and not isinstance(side, Exception):
                raise side
        self.num_bytes: int | None = None if isinstance(sent, Exception) else sent
        self.failures: Mapping[str, Exception] | None = (
            None if isinstance(received, Exception) else received
        )
        self.errors = [side for side in (sent, received) if isinstance(side, Exception)]
        """Of the trainer first."""
        self.errors += (self.failures or {}).values()
        self.has_lost_trainer = any(
            isinstance(each, WorkerFailedError) for each in _members_of(sent)
        )
        """Whether a rank of it has died, without which nothing can be sent."""
        by_instance = (
            received.errors if isinstance(received, GroupCallError) else self.failures or {}
        )
        self.unable = {
            id_
            for id_, each in by_instance.items()
            if isinstance(each, EngineCallError) and not _is_broken(each)
        }
        """Instances that failed by themselves, and would again."""


def _members_of(error: Any) -> Collection[Any]:
    return error.errors.values() if isinstance(error, GroupCallError) else [error]


def _is_broken(error: Exception) -> bool:
    """Whether a member of the group is gone or late, so that others may have gone without."""
    return any(
        isinstance(each, WorkerFailedError)
        or (
            isinstance(each, EngineCallError)
            and (each.remote_type == "ConnectionError" or is_communication_error(each))
        )
        for each in _members_of(error)
    )
