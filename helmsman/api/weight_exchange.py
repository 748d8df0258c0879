"""What a weight sync needs of both sides: WeightSource, a training job, and WeightSink, the
instances of a rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from helmsman.api.generation import InFlight
from helmsman.api.scheduler import ResultHandle, Scheduler, Worker
from helmsman.api.weights import WeightFormat, Weights, WeightTarget


class WeightPeer(Protocol):
    """What both sides have. Coroutines run on Helmsman's event loop; every ``timeout`` is in
    seconds.
    """

    scheduler: Scheduler
    role: str
    group_id: str
    """Id of the weight-sync group that its processes joined last; '' for none, and after a process
    was replaced.
    """

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Its workers in rank order. Raises: HelmsmanError unless it is started."""


class WeightSource(WeightPeer, Protocol):
    """Sends the weights of a training job."""

    async def version(self, timeout: float | None = None) -> int:
        """The weight version, on which all ranks agree."""

    async def export(self, version: int, timeout: float) -> ResultHandle:
        """Gather all parameters on rank 0 and return their handle. Raises: HelmsmanError for
        weights of another version.
        """

    async def publish(self, target: WeightTarget, form: WeightFormat, timeout: float | None) -> Any:
        """Send the weights to a target. Returns a handle, WeightsOnDisk, or the number of bytes, by
        the kind of target.
        """

    async def open_store(self, timeout: float | None) -> int:
        """Open a store on rank 0 where the members of a group meet; returns its port."""


class WeightSink(WeightPeer, Protocol):
    """Serves weights on the instances of a rollout."""

    def hold(self, in_flight: InFlight, timeout: float | None) -> AbstractAsyncContextManager[None]:
        """A block in which this is the only update under way; ``in_flight`` decides on running
        requests.
        """

    def living_ids(self, *, with_suspects: bool = True) -> list[str]:
        """Ids of instances that have not died. Raises: the reason when none lives or will."""

    async def answering_ids(self) -> list[str]:
        """Ids of living instances that answer now."""

    async def update(
        self,
        weights: Mapping[str, ResultHandle | Weights],
        version: int,
        timeout: float | None,
        *,
        kept: ResultHandle | Weights | None = None,
        sending: asyncio.Future[Any] | None = None,
    ) -> Mapping[str, Exception]:
        """Serve ``version`` on these instances, and on no other, by one call each; within ``hold``.

        Args:
            weights: instance id -> the argument of its engine's ``update_weights``.
            kept: weights for an instance that is rebuilt before the next update; None where there
                are none to keep.
            sending: the transfer that the instances wait for; once it fails they get a short grace
                to fail by themselves.
        Returns: failures by instance id. Raises: as RolloutController.update_weights.
        """

    def keeps(self, weights: ResultHandle) -> bool:
        """Whether it keeps the handle for instances that are rebuilt; it releases it later."""

    def served_by(
        self, failures: Mapping[str, Exception]
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Ids of the instances that serve, and by id why the others do not; ``failures`` are those
        of the last update.
        """


@runtime_checkable
class SendsWeights(Protocol):
    """A TrainController."""

    @property
    def weight_source(self) -> WeightSource:
        """Its end of a weight sync."""


@runtime_checkable
class ReceivesWeights(Protocol):
    """A RolloutController."""

    @property
    def weight_sink(self) -> WeightSink:
        """Its end of a weight sync."""
