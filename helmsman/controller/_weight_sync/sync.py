"""WeightSync: pushes a trainer's weights to the instances of a rollout over one of its transports.

Each instance receives them in one call.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from helmsman.api.errors import (
    EngineCallError,
    GroupCallError,
    HandleLostError,
    HelmsmanError,
    MethodNotFoundError,
    WorkerFailedError,
)
from helmsman.api.generation import InFlight
from helmsman.api.scheduler import ResultHandle
from helmsman.api.weight_exchange import ReceivesWeights, SendsWeights, WeightSink, WeightSource
from helmsman.api.weights import (
    CollectiveTarget,
    DeviceTarget,
    DiskTarget,
    MemoryTarget,
    WeightFormat,
    WeightsOnDisk,
    WeightTarget,
)
from helmsman.api.workers import Worker
from helmsman.controller._aio.event_loop import run_async
from helmsman.controller._roles.call_all import is_communication_error, observe, release
from helmsman.controller._roles.role_controller import blocking
from helmsman.controller._validation.argument_types import checked

log = logging.getLogger(__name__)

_GROUP_IS_BROKEN = "weight-sync group has left"
"""Part of the reason why an instance was updated only in part, see WeightGroup."""

Transferred: TypeAlias = tuple[int, Mapping[str, Exception]]
"""Bytes that left the trainer, and the errors by instance id."""


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a weight push."""

    version: int
    """Weight version that the instances serve."""
    num_bytes: int
    """Bytes that left the trainer, counted once for all instances."""
    seconds: float
    """Duration of the push."""
    updated: tuple[str, ...]
    """Ids of the instances that serve the version."""
    failed: dict[str, str]
    """Instance id -> reason why it does not serve the version."""


class WeightSync:
    """Pushes the weights of one trainer to the instances of one rollout.

    An instance whose update fails receives no requests until an update succeeds. Its requests
    continue on other instances.

    Args:
        trainer: The TrainController that sends the weights.
        rollout: The RolloutController that receives them.
        way: The transport: ViaMemory, ViaDevice, ViaCollective or ViaDisk. When None, ViaDevice for
            instances on the trainer's devices, else ViaMemory.
        form: Data type, parameter names, bucket size and checksums of the sent weights.
        in_flight: Handling of requests in flight. "keep": they continue with the new weights, and
            each token records its version. "wait": they finish with the old weights first, and no
            new request starts. "abort": they are recalled with their tokens so far, and continue
            with the new weights on any instance.

    Raises:
        ValueError: The two roles run on different schedulers, or the transport cannot connect them.
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
                f"role {source.role!r} and role {sink.role!r} run on two schedulers; expected "
                "one, since weights are sent between its workers"
            )
        self._transport, self._form, self._in_flight = (
            way or _ByPlacement(),
            form or WeightFormat(),
            in_flight,
        )
        self._transport.check(source, sink)

    @checked
    async def async_push(self, timeout: float | None = None) -> SyncReport:
        """Push the trainer's weights to all live instances, which then serve them.

        Args:
            timeout: Limit in seconds for the whole push; the scheduler's ``timeouts.call_s`` when
                None.

        Returns:
            The version, the transferred bytes, and the instances that serve the version or failed.

        Raises:
            ValueError: The trainer's version is below the last one pushed.
            RequestsInFlightError: Requests did not finish, or were not recalled, in time.
            HelmsmanError: The trainer failed, the rollout is asleep without memory for weights, or
                another update was running for all of ``timeout``. No instance has changed, unless
                ViaCollective was in the middle of its broadcasts.
            GroupCallError: An update failed on an instance; under supervision, on all instances. A
                role with one instance raises its CallError.
        """
        return await run_async(self._push(timeout))

    push = blocking(async_push)

    async def _push(self, timeout: float | None) -> SyncReport:
        started = time.monotonic()
        deadline = started + (
            self._source.scheduler.timeouts.call_s if timeout is None else timeout
        )
        scheduler, roles = self._source.scheduler, f"{self._source.role} to {self._sink.role}"
        with scheduler.reporter.phase("weight sync", roles):
            async with self._sink.hold(self._in_flight, deadline - time.monotonic()):
                version = await self._source.version(deadline - time.monotonic())
                num_bytes, failures = await self._transport.transfer(
                    Push(self._source, self._sink, self._form, version, deadline)
                )
                updated, failed = self._sink.served_by(failures)
        return SyncReport(
            version=version,
            num_bytes=num_bytes,
            seconds=time.monotonic() - started,
            updated=updated,
            failed=failed,
        )


class Push(NamedTuple):
    """One transfer of weights."""

    source: WeightSource
    """The trainer."""
    sink: WeightSink
    """The rollout."""
    form: WeightFormat
    """Data type, names and bucket size of the weights."""
    version: int
    """Weight version that the trainer must have."""
    deadline: float
    """End of the transfer, on the clock of ``time.monotonic``."""

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    async def store(self, target: WeightTarget) -> Transferred:
        """Have the trainer store its weights, and each instance read them there."""
        return await self.read_by_all(await self.source.publish(target, self.form, self.left_s))

    async def read_by_all(self, stored: ResultHandle | WeightsOnDisk) -> Transferred:
        """Have each instance read weights that the trainer has stored."""
        try:
            weights = dict.fromkeys(self.sink.living_ids(), stored)
            failures = await self.sink.update(weights, self.version, self.left_s, kept=stored)
        finally:
            if isinstance(stored, ResultHandle) and not self.sink.keeps(stored):
                await asyncio.to_thread(release, self.source.scheduler, stored)
        return stored.nbytes if isinstance(stored, ResultHandle) else stored.num_bytes, failures


class WeightTransport(abc.ABC):
    """Moves weights from a trainer to the instances of a rollout."""

    def check(self, source: WeightSource, sink: WeightSink) -> None:
        """Check that this transport can connect the two roles. By default, it always can.

        Args:
            source: The trainer.
            sink: The rollout.

        Raises:
            ValueError: The transport cannot connect them.
        """
        return

    @abc.abstractmethod
    async def transfer(self, push: Push) -> Transferred:
        """Transfer the weights of one version.

        Returns:
            Bytes that left the trainer, and the errors by instance id.

        Raises:
            HelmsmanError: The trainer failed, or no instance serves the weights.
        """


class ViaMemory(WeightTransport):
    """Sends weights through host memory, from worker to worker.

    Rank 0 gathers all weights in host memory: the shared memory of its node, or Ray's object store.
    Each instance reads them from there; the instances of another node share one copy.
    """

    async def transfer(self, push: Push) -> Transferred:
        return await push.store(MemoryTarget(version=push.version))


class ViaDevice(WeightTransport):
    """Hands weights to instances on the trainer's devices, through two buffers of each device.

    Each trainer rank gathers the weights bucket by bucket and fills one buffer while the process on
    its device loads the other. Nothing is copied to the host. An instance of several ranks needs a
    trainer rank on each of its devices. On nodes without devices the buffers are on the host.

    Where an instance is on other devices, or the devices' memory cannot be shared between
    processes, the push falls back to ViaMemory and logs the reason. An instance that is rebuilt
    between two pushes receives the weights by ViaMemory, unless the trainer has others by then.

    Args:
        timeout: Limit in seconds for which a trainer rank waits for an instance, before it goes on
            without; an instance waits twice as long.
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
                    unable = [each for each in _members_of(error) if _is_unable(each)]
                    if not unable:
                        raise
                    reason, self._can_share = str(unable[0]).split("\n", 1)[0], False
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
        source, sink = push.source, push.sink
        seats = await source.open_seats(push.left_s)
        receivers: list[list[str]] = [[] for _ in seats]
        for id_, its_ranks in ranks.items():
            for rank in its_ranks:
                receivers[rank].append(id_)
        place = DeviceTarget(
            version=push.version,
            key=uuid.uuid4().hex,
            seats=tuple(seats),
            receivers=tuple(map(tuple, receivers)),
            timeout_s=max(0.1, min(self._timeout_s, push.left_s)),
        )
        weights = {
            id_: msgspec.structs.replace(
                place, seats=tuple(seats[rank] for rank in its_ranks), receivers=(), receiver=id_
            )
            for id_, its_ranks in ranks.items()
        }
        sending = asyncio.ensure_future(source.publish(place, push.form, push.left_s))

        def leave_out(id_: str, _error: BaseException) -> None:
            if not sending.done() or sending.cancelled():
                observe(source.leave_out(weights[id_]), f"{source.role}: leaving out {id_}")

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

        async def update() -> Mapping[str, Exception]:
            try:
                return await sink.update(
                    weights,
                    push.version,
                    push.left_s,
                    kept=from_memory,
                    sending=sending,
                    on_failure=leave_out,
                )
            except BaseException as error:  # of the update as a whole, or a cancellation
                for id_ in weights:
                    leave_out(id_, error)
                raise

        outcome = _Outcome(*await asyncio.gather(sending, update(), return_exceptions=True))
        for each in outcome.errors:
            if any(map(_is_unable, _members_of(each))):
                raise each
        return outcome.transferred()


class _ByPlacement(WeightTransport):
    """ViaDevice if the two roles share devices at the time of a push, else ViaMemory."""

    def __init__(self) -> None:
        self._via_device = ViaDevice()

    async def transfer(self, push: Push) -> Transferred:
        if _devices_of(push.source.workers) & _devices_of(push.sink.workers):
            return await self._via_device.transfer(push)
        return await ViaMemory().transfer(push)


class ViaExport(WeightTransport):
    """Like ViaMemory, for engines without ``publish_weights``: uses ``export_weights``.

    Parameters are sent unconverted: ``form`` is ignored.
    """

    async def transfer(self, push: Push) -> Transferred:
        return await push.read_by_all(await push.source.export(push.version, push.left_s))


class ViaDisk(WeightTransport):
    """Sends weights as safetensors files in a folder on storage that all workers share.

    The folder of a version appears only when it is complete. It has the Hugging Face layout, so
    other programs can read it.

    Args:
        folder: Parent folder, at the same path on all nodes; a relative path is resolved against
            the script's current folder.
        num_kept: Number of versions to keep, newest first.

    Raises:
        ValueError: ``num_kept`` is below 1.
    """

    def __init__(self, folder: str, num_kept: int = 2) -> None:
        if num_kept < 1:
            raise ValueError(f"num_kept is {num_kept}; expected 1 or more")
        self._folder, self._num_kept = os.path.abspath(folder), num_kept

    async def transfer(self, push: Push) -> Transferred:
        return await push.store(
            DiskTarget(version=push.version, folder=self._folder, num_kept=self._num_kept)
        )


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
        shared = [each.id for each in sink.workers if _devices_of([each]) & _devices_of([sender])]
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
        if any(map(_is_broken, outcome.errors)) and not outcome.has_lost_trainer:
            left = [id_ for id_ in await push.sink.answering_ids() if id_ not in outcome.unable]
            if left:
                outcome = await self._broadcast(push, left)
        return outcome.transferred()

    async def _broadcast(self, push: Push, ids: Sequence[str]) -> _Outcome:
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
            rank=0,
            world_size=1 + len(ids),
            timeout_s=max(0.1, min(self._timeout_s, push.left_s)),
        )
        weights = {
            id_: msgspec.structs.replace(place, rank=rank) for rank, id_ in enumerate(ids, 1)
        }
        sending = asyncio.ensure_future(source.publish(place, push.form, push.left_s))

        def abort(id_: str, error: Exception) -> None:
            # A live member leaves by itself. Neither gloo nor NCCL notices a dead one in time.
            if isinstance(error, WorkerFailedError) and not sending.done():
                observe(source.leave_out(weights[id_]), f"{source.role}: leaving out {id_}")

        sides: tuple[Any, Any] = await asyncio.gather(
            sending,
            sink.update(
                weights,
                push.version,
                push.left_s,
                kept=None,
                sending=sending,
                on_failure=abort,
            ),
            return_exceptions=True,
        )
        outcome = _Outcome(*sides)
        if not outcome.errors:
            self._members = tuple(ids)
        return outcome


class _Outcome:
    """Results or errors of a broadcast transfer, on both sides."""

    def __init__(self, sent: Any, received: Any) -> None:
        for side in (sent, received):
            if isinstance(side, BaseException) and not isinstance(side, Exception):
                raise side
        self.num_bytes: int | None = None if isinstance(sent, Exception) else sent
        self.failures: Mapping[str, Exception] | None = (
            None if isinstance(received, Exception) else received
        )
        self.errors = [side for side in (sent, received) if isinstance(side, Exception)]
        """Errors of both sides, the trainer's first."""
        self.errors += (self.failures or {}).values()
        self.has_lost_trainer = any(
            isinstance(each, WorkerFailedError) for each in _members_of(sent)
        )
        """Whether a trainer rank has died; a second attempt is then impossible."""
        by_instance = (
            received.errors if isinstance(received, GroupCallError) else self.failures or {}
        )
        self.unable = {
            id_
            for id_, each in by_instance.items()
            if isinstance(each, EngineCallError) and not _is_broken(each)
        }
        """Instances whose own failure would recur in a second attempt."""

    def transferred(self) -> Transferred:
        """Return the results, or raise the error of a side that failed as a whole."""
        if self.num_bytes is None or self.failures is None:
            raise self.errors[0]
        return self.num_bytes, self.failures


def _devices_of(workers: Sequence[Worker]) -> set[tuple[str, str]]:
    """Return the node and id of each device of some workers."""
    return {(each.node_id, str(device)) for each in workers for device in each.devices}


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
                    f"{instance.id} is on {where} of node {instance.node_id}, where no trainer "
                    "rank is; use ViaMemory"
                )
            rank = min(beside, key=num_served.__getitem__)
            num_served[rank] += 1
            found[instance.id].append(rank)
    return found


def _is_unable(error: Exception) -> bool:
    """Whether an engine cannot share its device's memory."""
    return isinstance(error, MethodNotFoundError) or (
        isinstance(error, EngineCallError)
        and error.remote_type in ("DeviceSharingError", "NotImplementedError")
    )


def _members_of(error: Any) -> Collection[Any]:
    return error.errors.values() if isinstance(error, GroupCallError) else [error]


def _is_broken(error: Exception) -> bool:
    """Whether a group member has died or is late, so that others may lack the weights."""
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
        for each in _members_of(error)
    )
