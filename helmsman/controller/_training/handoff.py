"""DeviceHandoff: a trainer and a rollout that use the same devices in turns.

    TRAINER <--> NONE <--> ROLLOUT   starts at NONE; each hand-over passes through NONE

    to_training   the rollout sleeps, then the trainer wakes
    to_rollout    the trainer sleeps, the rollout allocates its weights, receives them from the
                  trainer, then allocates its KV cache

A side wakes only after the other sleeps, so devices never hold both. The sleeping trainer sends the
weights and moves one parameter at a time onto its devices. After a failed hand-over the owner is
NONE, or unchanged after RequestsInFlightError. From NONE, the next hand-over in either direction
starts by putting the other side to sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from enum import Enum
from typing import Any, Literal

from helmsman._base.event_loop import run_async, run_sync
from helmsman.api.errors import (
    CallError,
    DeviceMemoryError,
    DevicesNotOwnedError,
    EngineCallError,
    EngineExistsError,
    EngineNotFoundError,
    GroupCallError,
    HelmsmanError,
    RequestsInFlightError,
)
from helmsman.api.platforms import MemoryStats
from helmsman.controller._groups.role_controller import blocking
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._training.train_controller import TrainController
from helmsman.controller._weights.sync import SyncReport, WeightSync

_PROBE = "helmsman.engines.memory.MemoryProbe"
_PROBE_NAME = "helmsman-memory"
_PROBE_LIMIT_S = 5.0
_NO_ROOM = re.compile(r"out of memory", re.IGNORECASE)
"""Text of CUDA and NPU runtime errors, whose types differ."""


class Owner(Enum):
    """The side that holds the shared devices."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    NONE = "none"
    """No turn has begun yet, a hand-over is in progress, or the last one failed."""


class DeviceHandoff:
    """Gives shared devices to a trainer and a rollout, one at a time.

    A call that needs the devices out of turn raises DevicesNotOwnedError. A call that runs out of
    device memory raises DeviceMemoryError with the memory use of both sides. Each operation ``x``
    blocks; ``async_x`` takes the same arguments and is awaited, from any event loop.

    Args:
        trainer: The trainer, initialized. If both sides do not fit on the devices at the start, put
            the trainer to sleep before initializing the rollout.
        rollout: The rollout, initialized.
        sync: The weight sync from trainer to rollout; WeightSync with its default transport when
            None.
        level: Sleep level of the rollout. 2 drops its weights, which the next hand-over sends
            again; 1 keeps them in host memory.
        in_flight: Handling of running requests when the trainer's turn begins; see
            RolloutController.sleep.
        hold_requests: Whether requests out of turn wait for the rollout's turn instead of raising.
            For scripts that wait for requests in one task and hand over in another.
        timeout: Limit in seconds for a hand-over; the scheduler's ``timeouts.call_s`` when None.

    Raises:
        ValueError: ``level`` or ``in_flight`` has an invalid value.
    """

    def __init__(
        self,
        trainer: TrainController,
        rollout: RolloutController,
        sync: WeightSync | None = None,
        *,
        level: int = 2,
        in_flight: Literal["wait", "abort"] = "wait",
        hold_requests: bool = False,
        timeout: float | None = None,
    ) -> None:
        if level not in (1, 2):
            raise ValueError(f"level is {level}; expected 1 or 2")
        if in_flight not in ("wait", "abort"):
            raise ValueError(f"in_flight is {in_flight!r}; expected 'wait' or 'abort'")
        self.owner = Owner.NONE
        self._why_none = "since no turn has begun yet"
        self._trainer, self._rollout = trainer, rollout
        self._sync = sync or WeightSync(trainer, rollout)
        self._level: int = level
        self._in_flight: Literal["wait", "abort"] = in_flight
        self._hold_requests = hold_requests
        self._limit_s = trainer.scheduler.timeouts.call_s if timeout is None else timeout
        self._one_hand_over = asyncio.Lock()
        run_sync(self._install_probes())
        trainer.device_owner = rollout.device_owner = self

    def close(self) -> None:
        """Detach from both sides, which keep their current state. Idempotent."""
        self._trainer.device_owner = self._rollout.device_owner = None

    async def async_to_training(self) -> None:
        """Give the devices to the trainer; does nothing if it has them.

        Raises:
            RequestsInFlightError: Requests did not end in time. The rollout keeps the devices.
            DeviceMemoryError: A device lacks memory.
            CallError: A call to the only worker of a role failed.
            GroupCallError: A call to a role with several workers failed.
        """
        await run_async(self._to_training())

    to_training = blocking(async_to_training)

    async def async_to_rollout(self) -> SyncReport | None:
        """Give the devices to the rollout and push the trainer's weights.

        Does nothing if the rollout has the devices.

        Returns:
            The report of the push; None if the rollout had the devices.

        Raises:
            DeviceMemoryError: A device lacks memory.
            ValueError: The trainer's weight version is below the last one pushed.
            CallError: A call to the only worker of a role failed.
            GroupCallError: A call to a role with several workers failed.
        """
        return await run_async(self._to_rollout())

    to_rollout = blocking(async_to_rollout)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Give the devices to the trainer for a ``with`` block.

        The trainer keeps them after the block, until the rollout's turn begins.
        """
        self.to_training()
        yield

    @contextlib.contextmanager
    def rollout(self) -> Iterator[SyncReport | None]:
        """Give the devices to the rollout for a ``with`` block, which receives the push report."""
        yield self.to_rollout()

    async def _to_training(self) -> None:
        async with self._hand_over(Owner.TRAINER) as left_s:
            if self.owner is Owner.TRAINER:
                return
            await self._have_rollout_sleep(left_s())
            await self._trainer.async_wake(left_s())
            self.owner = Owner.TRAINER

    async def _to_rollout(self) -> SyncReport | None:
        async with self._hand_over(Owner.ROLLOUT) as left_s:
            if self.owner is Owner.ROLLOUT:
                return None
            self.owner = Owner.NONE
            await self._trainer.async_sleep(left_s())
            await self._rollout.async_wake(weights_only=True, timeout=left_s())
            report = await self._sync.async_push(left_s())
            await self._rollout.async_wake(timeout=left_s())
            self.owner = Owner.ROLLOUT
            return report

    @contextlib.asynccontextmanager
    async def _hand_over(self, to: Owner) -> AsyncIterator[Callable[[], float]]:
        """Serialize hand-overs under one deadline; yields a function of the remaining seconds."""
        deadline = time.monotonic() + self._limit_s
        async with self._one_hand_over:
            self._why_none = f"while they are handed over to the {to.value}"
            try:
                yield lambda: deadline - time.monotonic()
            except BaseException as error:
                failed = f"since the hand-over to the {to.value} failed"
                self._why_none = f"{failed} ({type(error).__name__})"
                try:
                    await self.explain(error)
                except DeviceMemoryError:
                    self._why_none = f"{failed} ({DeviceMemoryError.__name__})"
                    raise
                raise

    def require(self, role: str, method: str) -> None:
        """Check that a role has the devices.

        Args:
            role: The trainer's or the rollout's role.
            method: Name of the method that needs the devices, for the error.

        Raises:
            DevicesNotOwnedError: It is not the role's turn.
        """
        wanted = Owner.TRAINER if role == self._trainer.role else Owner.ROLLOUT
        if self.owner is wanted or (wanted is Owner.ROLLOUT and self._hold_requests):
            return
        verb = "to_training()" if wanted is Owner.TRAINER else "to_rollout()"
        block = "training()" if wanted is Owner.TRAINER else "rollout()"
        next_step = (
            f"Call {verb} of its DeviceHandoff first, or use a block 'with handoff.{block}:'."
        )
        raise DevicesNotOwnedError(
            role=role, method=method, owner=self._whose(), next_step=next_step
        )

    async def explain(self, error: BaseException) -> None:
        """Raise DeviceMemoryError from an error that was caused by a lack of device memory."""
        cause = _no_room(error)
        if cause is None or isinstance(error, DeviceMemoryError):
            return
        figures = [f"{worker_id}: {text}" for worker_id, text in (await self._memory()).items()]
        raise DeviceMemoryError(
            worker_id=cause.worker_id,
            method=cause.method,
            reason=cause.remote_message.split("\n", 1)[0],
            owner=self._whose(),
            figures=figures,
        ) from error

    def make_room(self) -> None:
        """Put the rollout to sleep and give the devices to a trainer that is about to be rebuilt.

        Raises:
            RequestsInFlightError: Requests did not end in time. The owner does not change.
            CallError: A call to the only worker of the rollout failed.
            GroupCallError: A call to a rollout with several workers failed.
        """
        run_sync(self._make_room())

    async def _make_room(self) -> None:
        async with self._hand_over(Owner.TRAINER) as left_s:
            await self._have_rollout_sleep(left_s())
            self.owner = Owner.TRAINER

    async def _have_rollout_sleep(self, limit_s: float) -> None:
        # If requests have not ended, the rollout stays awake and the owner does not change.
        before, self.owner = self.owner, Owner.NONE
        try:
            await self._rollout.async_sleep(self._level, self._in_flight, limit_s)
        except RequestsInFlightError:
            self.owner = before
            raise

    def _whose(self) -> str:
        if self.owner is Owner.NONE:
            return f"unassigned, {self._why_none}"
        side = self._trainer if self.owner is Owner.TRAINER else self._rollout
        return f"held by role {side.role!r}"

    async def async_memory(self) -> dict[str, MemoryStats | str]:
        """Return the device memory of both sides by worker id, or the reason why it is unknown."""
        return await run_async(self._memory())

    memory = blocking(async_memory)

    async def _memory(self) -> dict[str, MemoryStats | str]:
        ids = self._worker_ids()
        answers = await asyncio.gather(*map(self._ask_probe, ids), return_exceptions=True)
        return {
            id_: answer if isinstance(answer, MemoryStats) else f"unknown: {_first_line(answer)}"
            for id_, answer in zip(ids, answers, strict=True)
        }

    async def _ask_probe(self, worker_id: str) -> Any:
        scheduler = self._trainer.scheduler
        async with asyncio.timeout(_PROBE_LIMIT_S):
            try:
                return await scheduler.async_call_engine(
                    worker_id, "figures", _PROBE_NAME, rpc_timeout=_PROBE_LIMIT_S
                )
            except EngineNotFoundError:  # the worker was restarted
                await self._install_probe(worker_id)
                return await scheduler.async_call_engine(
                    worker_id, "figures", _PROBE_NAME, rpc_timeout=_PROBE_LIMIT_S
                )

    def _worker_ids(self) -> list[str]:
        """Return the worker ids of both sides, without those of a closed side."""
        ids: list[str] = []
        for side in (self._trainer, self._rollout):
            with contextlib.suppress(HelmsmanError):
                ids += [worker.id for worker in side.workers]
        return ids

    async def _install_probes(self) -> None:
        # At construction: later, a busy engine thread would delay it.
        outcomes = await asyncio.gather(
            *map(self._install_probe, self._worker_ids()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, CallError):
                # Dead workers are tolerated; their memory is reported as unknown.
                raise outcome

    async def _install_probe(self, worker_id: str) -> None:
        with contextlib.suppress(EngineExistsError):  # both roles share the worker
            await self._trainer.scheduler.create_engine(worker_id, _PROBE, _PROBE_NAME)


def _first_line(error: Any) -> str:
    return (
        str(error).split("\n", 1)[0]
        or f"no answer within {_PROBE_LIMIT_S:g} s ({type(error).__name__})"
    )


def _no_room(error: BaseException) -> EngineCallError | None:
    """Find the out-of-memory error in an error, its members or its causes."""
    if isinstance(error, GroupCallError):
        return next(
            (found for each in error.errors.values() if (found := _no_room(each)) is not None), None
        )
    if isinstance(error, EngineCallError):
        return (
            error
            if error.remote_type.endswith("OutOfMemoryError")
            or _NO_ROOM.search(error.remote_message)
            else None
        )
    if isinstance(error, HelmsmanError) and error.__cause__ is not None:
        return _no_room(error.__cause__)
    return None
