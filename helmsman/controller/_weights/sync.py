"""WeightSync: pushes a trainer's weights to the instances of a rollout over one of its transports.

Each instance receives them in one call.
"""

from __future__ import annotations

import time

import msgspec

from helmsman._base.event_loop import run_async
from helmsman.api.generation import InFlight
from helmsman.api.weight_exchange import ReceivesWeights, SendsWeights
from helmsman.api.weights import WeightFormat
from helmsman.controller._groups.role_controller import blocking
from helmsman.controller._scheduler.argument_types import require_seconds
from helmsman.controller._weights.transport import Push, WeightTransport
from helmsman.controller._weights.via_device import ByPlacement


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
        self._transport = way or ByPlacement()
        self._form = form or WeightFormat()
        self._in_flight = in_flight
        self._transport.check(source, sink)

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
        require_seconds("push", timeout)
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
