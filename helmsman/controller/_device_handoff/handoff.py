"""DeviceHandoff: a trainer and a rollout on the same devices, one after the other.

    NOBODY --> TRAINER <--> NOBODY <--> ROLLOUT

    to_training   the rollout sleeps, the trainer wakes
    to_rollout    the trainer sleeps, the rollout wakes for weights, gets them from the
                  trainer's hosts, wakes for its cache

A side wakes when the other sleeps, so no device ever has to hold both. The weights go from a
trainer that sleeps, which brings one parameter at a time onto its devices. Whatever fails in
between, the devices are nobody's then, and the next hand-over, in either direction, begins with
putting the other side to sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from enum import Enum
from typing import Any, Literal

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
from helmsman.controller._aio.event_loop import run_async, run_sync
from helmsman.controller._roles.role_controller import blocking
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._training.train_controller import TrainController
from helmsman.controller._weight_sync.sync import SyncReport, WeightSync

_PROBE = "helmsman.engines.memory.MemoryProbe"
_PROBE_NAME = "helmsman-memory"
_PROBE_LIMIT_S = 5.0
_NO_ROOM = re.compile(r"out of memory", re.IGNORECASE)
"""As CUDA and NPU runtimes say it, whatever the type of their error."""


class Owner(Enum):
    """Whose devices these are."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    NOBODY = "nobody"
    """No turn was given yet, a hand-over is under way, or one has failed."""


class DeviceHandoff:
    """Gives the devices that a trainer and a rollout share to one of them at a time.

    A call that needs them out of turn raises DevicesNotOwnedError; one that finds no room on them
    raises DeviceMemoryError, with both sides' figures. Methods whose names begin with ``a`` are
    awaited, from any event loop; the others block.

    Args:
        trainer, rollout: initialized. Where they do not fit beside each other at the start, put the
            trainer to sleep before the rollout is initialized.
        sync: how weights get from one to the other; by memory when None.
        level: at which the rollout sleeps: 2 drops weights that the next hand-over brings anyway, 1
            keeps them on the hosts.
        in_flight: what becomes of the rollout's requests when the trainer's turn comes; see
            RolloutController.sleep.
        hold_requests: requests that come out of turn wait for the rollout's turn instead of being
            refused: for a script that hands over in another task than the one that waits for them.
        timeout: seconds for a hand-over; the scheduler's ``timeouts.call_s`` when None.
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
        self.owner = Owner.NOBODY
        self._why_nobody = "as no turn was given yet"
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
        """Leave both sides to the script, as they are now. Idempotent."""
        self._trainer.device_owner = self._rollout.device_owner = None

    async def async_to_training(self) -> None:
        """Give the devices to the trainer. Nothing happens when it has them.

        Raises: RequestsInFlightError, after which they are still the rollout's; DeviceMemoryError;
            as sleep and wake.
        """
        await run_async(self._to_training())

    to_training = blocking(async_to_training)

    async def async_to_rollout(self) -> SyncReport | None:
        """Give the devices to the rollout, with the trainer's weights. Nothing happens when it has
        them.

        Returns: what was brought; None when the rollout had the devices. Raises: DeviceMemoryError;
            as sleep, wake and WeightSync.push.
        """
        return await run_async(self._to_rollout())

    to_rollout = blocking(async_to_rollout)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A block that is the trainer's turn; the devices stay the trainer's until somebody else's
        turn begins.
        """
        self.to_training()
        yield

    @contextlib.contextmanager
    def rollout(self) -> Iterator[SyncReport | None]:
        """A block that is the rollout's turn."""
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
            self.owner = Owner.NOBODY
            await self._trainer.async_sleep(left_s())
            await self._rollout.async_wake(weights_only=True, timeout=left_s())
            report = await self._sync.async_push(left_s())
            await self._rollout.async_wake(timeout=left_s())
            self.owner = Owner.ROLLOUT
            return report

    @contextlib.asynccontextmanager
    async def _hand_over(self, to: Owner) -> AsyncIterator[Callable[[], float]]:
        """One at a time, with one deadline; gives the seconds that are left."""
        deadline = time.monotonic() + self._limit_s
        async with self._one_hand_over:
            self._why_nobody = f"while they are handed over to the {to.value}"
            try:
                yield lambda: deadline - time.monotonic()
            except BaseException as error:
                failed = f"since the hand-over to the {to.value} failed"
                self._why_nobody = f"{failed} ({type(error).__name__})"
                try:
                    await self.explain(error)
                except DeviceMemoryError:
                    self._why_nobody = f"{failed} ({DeviceMemoryError.__name__})"
                    raise
                raise

    def require(self, role: str, method: str) -> None:
        """Raise DevicesNotOwnedError unless it is this role's turn."""
        wanted = Owner.TRAINER if role == self._trainer.role else Owner.ROLLOUT
        if self.owner is wanted or (wanted is Owner.ROLLOUT and self._hold_requests):
            return
        verb = "to_training()" if wanted is Owner.TRAINER else "to_rollout()"
        block = "training()" if wanted is Owner.TRAINER else "rollout()"
        next_step = (
            f"Call {verb} of its DeviceHandoff first, or do it in a block 'with turns.{block}:'."
        )
        raise DevicesNotOwnedError(
            role=role, method=method, owner=self._whose(), next_step=next_step
        )

    async def explain(self, error: BaseException) -> None:
        """Raise DeviceMemoryError from an error that comes from devices without room."""
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
        """Have the devices free for a trainer that is rebuilt, whose they are then. Raises: as
        to_training.
        """
        run_sync(self._make_room())

    async def _make_room(self) -> None:
        async with self._hand_over(Owner.TRAINER) as left_s:
            await self._have_rollout_sleep(left_s())
            self.owner = Owner.TRAINER

    async def _have_rollout_sleep(self, limit_s: float) -> None:
        """The devices are nobody's then; they are still whose they were when requests have not
        ended, as it stays awake.
        """
        before, self.owner = self.owner, Owner.NOBODY
        try:
            await self._rollout.async_sleep(self._level, self._in_flight, limit_s)
        except RequestsInFlightError:
            self.owner = before
            raise

    def _whose(self) -> str:
        if self.owner is Owner.NOBODY:
            return f"nobody's, {self._why_nobody}"
        return f"role {(self._trainer if self.owner is Owner.TRAINER else self._rollout).role!r}'s"

    async def async_memory(self) -> dict[str, MemoryStats | str]:
        """The device memory of each worker of both sides, or why it is not known."""
        return await run_async(self._memory())

    memory = blocking(async_memory)

    async def _memory(self) -> dict[str, MemoryStats | str]:
        ids = self._worker_ids()
        answers = await asyncio.gather(*map(self._ask_probe, ids), return_exceptions=True)
        return {
            id_: answer if isinstance(answer, MemoryStats) else f"not known, {_first_line(answer)}"
            for id_, answer in zip(ids, answers, strict=True)
        }

    async def _ask_probe(self, worker_id: str) -> Any:
        scheduler = self._trainer.scheduler
        async with asyncio.timeout(_PROBE_LIMIT_S):
            try:
                return await scheduler.async_call_engine(
                    worker_id, "figures", _PROBE_NAME, rpc_timeout=_PROBE_LIMIT_S
                )
            except EngineNotFoundError:  # its worker was restarted since
                await self._install_probe(worker_id)
                return await scheduler.async_call_engine(
                    worker_id, "figures", _PROBE_NAME, rpc_timeout=_PROBE_LIMIT_S
                )

    def _worker_ids(self) -> list[str]:
        """Of both sides; of one that is closed, none."""
        ids: list[str] = []
        for side in (self._trainer, self._rollout):
            with contextlib.suppress(HelmsmanError):
                ids += [worker.id for worker in side.workers]
        return ids

    async def _install_probes(self) -> None:
        """Now, as an engine's thread that is busy would keep one waiting later on."""
        outcomes = await asyncio.gather(
            *map(self._install_probe, self._worker_ids()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, CallError):
                # a dead worker has no figures
                raise outcome

    async def _install_probe(self, worker_id: str) -> None:
        with contextlib.suppress(EngineExistsError):  # two roles in one worker
            await self._trainer.scheduler.create_engine(worker_id, _PROBE, _PROBE_NAME)


def _first_line(error: Any) -> str:
    return (
        str(error).split("\n", 1)[0]
        or f"as it gave no answer within {_PROBE_LIMIT_S:g} s ({type(error).__name__})"
    )


def _no_room(error: BaseException) -> EngineCallError | None:
    """What says of a device that it is full, in an error or what it gathers."""
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
