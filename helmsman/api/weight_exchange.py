"""The two ends of a weight sync: WeightSource (training job), WeightSink (rollout instances)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias, runtime_checkable

from helmsman.api.generation import InFlight
from helmsman.api.scheduler import ResultHandle, Scheduler, Worker
from helmsman.api.weights import CollectiveTarget, DeviceTarget, WeightFormat, Weights, WeightTarget

KeptWeights: TypeAlias = ResultHandle | Weights | Callable[[], Awaitable[ResultHandle]]
"""Weights for an instance that is rebuilt, or a function that has the trainer store them; it raises
HandleLostError if the trainer cannot.
"""


class WeightPeer(Protocol):
    """Members common to both ends.

    Coroutines run on Helmsman's event loop; every ``timeout`` is in seconds.
    """

    scheduler: Scheduler
    role: str
    group_id: str
    """Id of the weight-sync group that its processes joined last; '' for none, and after a process
    was replaced.
    """

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Its workers in rank order.

        Raises:
            HelmsmanError: It is not started.
        """


class WeightSource(WeightPeer, Protocol):
    """Sends the weights of a training job."""

    async def version(self, timeout: float | None = None) -> int:
        """Return the weight version, on which all ranks agree."""

    async def publish(self, target: WeightTarget, form: WeightFormat, timeout: float | None) -> Any:
        """Send the weights to a target.

        Args:
            target: The destination.
            form: Data type, names and buckets of the parameters.
            timeout: Limit in seconds.

        Returns:
            A handle, WeightsOnDisk or the number of bytes, depending on the kind of target.

        Raises:
            HelmsmanError: The weights have another version than the target, or a rank failed.
        """

    async def open_store(self, timeout: float | None) -> int:
        """Open a store on rank 0, through which a group's members connect; returns its port."""

    async def open_sockets(self, timeout: float | None) -> list[str]:
        """Have every rank listen for processes on its device; returns the addresses in order."""

    async def leave_out(self, target: CollectiveTarget | DeviceTarget) -> None:
        """Make the ranks stop waiting for a receiver that no longer takes part.

        Args:
            target: The receiver's target.
        """


class WeightSink(WeightPeer, Protocol):
    """Serves weights on the instances of a rollout."""

    def hold(self, in_flight: InFlight, timeout: float | None) -> AbstractAsyncContextManager[None]:
        """Hold the update lock of the instances.

        Args:
            in_flight: Handling of running requests.
            timeout: Limit in seconds.

        Returns:
            A context in which no other update runs.
        """

    def living_ids(self, *, with_suspects: bool = True) -> list[str]:
        """Return the ids of instances that have not died.

        Raises:
            HelmsmanError: No instance is alive or will be; gives the reason.
        """

    async def answering_ids(self) -> list[str]:
        """Return the ids of live instances that answer now."""

    async def update(
        self,
        weights: Mapping[str, ResultHandle | Weights],
        version: int,
        timeout: float | None,
        *,
        kept: KeptWeights | None = None,
        sending: asyncio.Future[Any] | None = None,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> Mapping[str, Exception]:
        """Load ``version`` on exactly these instances, by one call each; requires ``hold``.

        Args:
            weights: Instance id -> the argument of its engine's ``update_weights``.
            version: The weight version.
            timeout: Limit in seconds.
            kept: Weights for an instance that is rebuilt before the next update; None if there are
                none.
            sending: The transfer that the instances wait for. Once it fails, they get a short grace
                period to fail by themselves.
            on_failure: Called with an instance's id and its error as soon as its call has failed.

        Returns:
            Failures by instance id.

        Raises:
            HelmsmanError: The update failed as a whole; see RolloutController.update_weights.
        """

    def keeps(self, weights: ResultHandle) -> bool:
        """Whether it keeps the handle for rebuilt instances; it then releases the handle later."""

    def served_by(
        self, failures: Mapping[str, Exception]
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the ids of the serving instances, and by id the reasons why others do not serve.

        ``failures`` are those of the last update.
        """


@runtime_checkable
class SendsWeights(Protocol):
    """A controller that sends weights: TrainController."""

    @property
    def weight_source(self) -> WeightSource:
        """Its end of a weight sync."""


@runtime_checkable
class ReceivesWeights(Protocol):
    """A controller that receives weights: RolloutController."""

    @property
    def weight_sink(self) -> WeightSink:
        """Its end of a weight sync."""
