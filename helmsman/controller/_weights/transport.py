"""WeightTransport: moves the weights of one push; its outcome on both sides."""

from __future__ import annotations

import abc
import asyncio
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from helmsman.api.errors import EngineCallError, GroupCallError, MethodNotFoundError
from helmsman.api.scheduler import ResultHandle
from helmsman.api.weight_exchange import KeptWeights, WeightSink, WeightSource
from helmsman.api.weights import (
    CollectiveTarget,
    DeviceTarget,
    DiskTarget,
    MemoryTarget,
    WeightFormat,
    WeightsOnDisk,
)
from helmsman.api.workers import Worker
from helmsman.controller._groups.call_all import observe, release

Transferred: TypeAlias = tuple[int, Mapping[str, Exception]]
"""Bytes that left the trainer, and the errors by instance id."""


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

    async def store(self, target: MemoryTarget | DiskTarget) -> Transferred:
        """Have the trainer store its weights, and each instance read them there."""
        stored: ResultHandle | WeightsOnDisk = await self.source.publish(
            target, self.form, self.left_s
        )
        try:
            weights = dict.fromkeys(self.sink.living_ids(), stored)
            failures = await self.sink.update(weights, self.version, self.left_s, kept=stored)
        finally:
            if isinstance(stored, ResultHandle) and not self.sink.keeps(stored):
                await asyncio.to_thread(release, self.source.scheduler, stored)
        return stored.nbytes if isinstance(stored, ResultHandle) else stored.num_bytes, failures

    async def stream(
        self,
        target: CollectiveTarget | DeviceTarget,
        weights: Mapping[str, CollectiveTarget | DeviceTarget],
        *,
        kept: KeptWeights | None,
        left_out_on: type[BaseException],
    ) -> Outcome:
        """Have the trainer send its weights while the instances receive them.

        Args:
            target: The trainer's target.
            weights: Instance id -> its target.
            kept: Weights for an instance that is rebuilt before the next push, if any.
            left_out_on: Errors of an instance after which the trainer stops waiting for it.
        """
        source = self.source
        sending = asyncio.ensure_future(source.publish(target, self.form, self.left_s))

        def leave_out(id_: str, error: BaseException) -> None:
            if isinstance(error, left_out_on) and (not sending.done() or sending.cancelled()):
                observe(source.leave_out(weights[id_]), f"{source.role}: leaving out {id_}")

        async def update() -> Mapping[str, Exception]:
            try:
                return await self.sink.update(
                    weights,
                    self.version,
                    self.left_s,
                    kept=kept,
                    sending=sending,
                    on_failure=leave_out,
                )
            except BaseException as error:  # of the update as a whole, or a cancellation
                for id_ in weights:
                    leave_out(id_, error)
                raise

        return Outcome(*await asyncio.gather(sending, update(), return_exceptions=True))


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


class Outcome:
    """Results or errors of a transfer in which both sides take part at once."""

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
        self.trainer_errors = members_of(sent) if isinstance(sent, Exception) else ()
        """Errors of the trainer's ranks."""
        self.by_instance: Mapping[str, Exception] = (
            received.errors if isinstance(received, GroupCallError) else self.failures or {}
        )
        """Errors by instance id."""

    def transferred(self) -> Transferred:
        """Return the results, or raise the error of a side that failed as a whole."""
        if self.num_bytes is None or self.failures is None:
            raise self.errors[0]
        return self.num_bytes, self.failures


def devices_of(workers: Sequence[Worker]) -> set[tuple[str, str]]:
    """Return the node and id of each device of some workers."""
    return {(each.node_id, str(device)) for each in workers for device in each.devices}


def members_of(error: Any) -> Collection[Any]:
    return error.errors.values() if isinstance(error, GroupCallError) else [error]


def unsupported(error: Exception) -> Exception | None:
    """Return the error of a worker whose engine lacks a method or a form of weights, if any."""
    for each in members_of(error):
        if isinstance(each, MethodNotFoundError) or (
            isinstance(each, EngineCallError)
            and each.remote_type in ("DeviceSharingError", "NotImplementedError")
        ):
            return each
    return None


class ViaMemory(WeightTransport):
    """Sends weights through host memory, from worker to worker.

    Rank 0 gathers all weights in host memory: the shared memory of its node, or Ray's object store.
    Each instance reads them from there; the instances of another node share one copy.
    """

    async def transfer(self, push: Push) -> Transferred:
        return await push.store(MemoryTarget(version=push.version))


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
