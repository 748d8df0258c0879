"""Fault injection: plans that kill, stop or slow workers at given steps of a script."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from helmsman.api.errors import FaultsUnsupportedError, HelmsmanError
from helmsman.api.faults import DropNode, Fault, Hang, Injection, Kill, Slow
from helmsman.api.scheduler import Scheduler

log = logging.getLogger(__name__)

_KINDS: Mapping[str, Callable[..., Fault]] = {
    "kill": Kill,
    "hang": Hang,
    "slow": Slow,
    "drop": DropNode,
}


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a fault at one worker."""

    at: float
    """Time of the injection, in seconds since the epoch."""
    step: int
    """Step of the script at which the fault was injected."""
    fault: Fault
    injection: Injection

    def __str__(self) -> str:
        it = self.injection
        what = it.outcome if it.done else f"nothing done, {it.outcome}"
        where = f" (pid {it.pid} on {it.node})" if it.pid is not None else ""
        return f"{self.fault}: {it.worker_id}{where}: {what}"


class FaultInjector:
    """Injects a plan's faults at their steps.

    ``FaultPlan.begin`` creates it. A missing worker is recorded and never raises.

    Args:
        faults: The faults, by step.
        scheduler: The scheduler of the workers.

    Raises:
        FaultsUnsupportedError: Workers share the script's process.
    """

    def __init__(self, faults: Sequence[Fault], scheduler: Scheduler) -> None:
        if faults and scheduler.shares_process:
            raise FaultsUnsupportedError(scheduler=type(scheduler).__name__)
        self._pending = list(faults)
        self._scheduler = scheduler
        self._has_begun = False
        self.record: list[FaultRecord] = []
        """All records so far, in order, including faults that could not be injected."""

    def step(self, step: int) -> list[FaultRecord]:
        """Inject the faults that are due at a step; call it at the start of each step.

        Faults of steps that were skipped since the last call are injected now. The first call drops
        faults of earlier steps, because a resumed run already had them. Each fault happens once.

        Args:
            step: Number of the step.

        Returns:
            The records of the injected faults.
        """
        if not self._pending:
            return []
        with ThreadPoolExecutor(1, "helmsman-faults") as pool:
            # The caller's thread may run an event loop.
            return pool.submit(asyncio.run, self.astep(step)).result()

    async def astep(self, step: int) -> list[FaultRecord]:
        """Inject the faults that are due at a step, like ``step``, from any event loop."""
        first, self._has_begun = not self._has_begun, True
        due = [fault for fault in self._pending if fault.at_step <= step]
        self._pending = [fault for fault in self._pending if fault.at_step > step]
        if first:
            due = [fault for fault in due if fault.at_step == step]
        found = await asyncio.gather(*map(self._inject, due))
        now = time.time()
        new = [
            FaultRecord(at=now, step=step, fault=fault, injection=injection)
            for fault, injections in zip(due, found, strict=True)
            for injection in injections
        ]
        for record in new:
            log.log(logging.INFO if record.injection.done else logging.WARNING, "drill: %s", record)
        self.record += new
        return new

    async def _inject(self, fault: Fault) -> list[Injection]:
        try:
            return await self._scheduler.inject(fault)
        except HelmsmanError as error:
            # A missing worker or a closed scheduler is recorded and does not end the run.
            return [
                Injection(
                    worker_id=fault.worker_id, pid=None, node="", done=False, outcome=str(error)
                )
            ]


class FaultPlan:
    """Faults in the order in which they are due.

    Args:
        faults: The faults, e.g. ``Kill("rollout/3", at_step=5)``. Faults of one step happen
            together. ``msgspec.json.decode(text, type=list[Fault])`` reads JSON objects with a
            ``type``.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults: tuple[Fault, ...] = tuple(sorted(faults, key=lambda fault: fault.at_step))

    @classmethod
    def random(
        cls,
        seed: int,
        workers: Sequence[str],
        steps: int,
        rates: Mapping[str, float],
        *,
        seconds: tuple[float, float] = (5.0, 60.0),
        factor: tuple[float, float] = (2.0, 10.0),
    ) -> FaultPlan:
        """Draw a random plan; the same arguments give the same plan on every machine.

        Args:
            seed: Seed of the random generator.
            workers: Ids of the workers that may be hit, each equally likely.
            steps: Number of steps of the script, numbered from 1.
            rates: Probability per step, 0 to 1, of each kind: 'kill', 'hang', 'slow', 'drop'.
            seconds: Shortest and longest duration of a hang or slowdown, in seconds.
            factor: Smallest and largest slowdown factor.

        Returns:
            The plan.

        Raises:
            ValueError: A rate has an unknown kind or is out of range, or ``workers`` is empty.
        """
        for kind, rate in rates.items():
            if kind not in _KINDS or not 0 <= rate <= 1:
                raise ValueError(
                    f"rates has {kind!r}: {rate!r}; expected {', '.join(map(repr, _KINDS))} with "
                    "0 to 1"
                )
        if rates and not workers:
            raise ValueError("workers is empty; expected the ids of the workers that may be hit")
        # Only random() draws the same numbers in every version of Python.
        source = random.Random(seed)

        def between(bounds: tuple[float, float]) -> float:
            return round(bounds[0] + (bounds[1] - bounds[0]) * source.random(), 3)

        def drawn() -> Iterator[Fault]:
            for step in range(1, steps + 1):
                for kind, make in _KINDS.items():
                    hits, place = source.random() < rates.get(kind, 0.0), source.random()
                    lasts, times = between(seconds), between(factor)
                    more = {
                        "hang": {"seconds": lasts},
                        "slow": {"seconds": lasts, "factor": times},
                    }.get(kind, {})
                    if hits:
                        # Everything is drawn in any case, so that a rate affects only its own kind.
                        yield make(workers[int(place * len(workers))], at_step=step, **more)

        return cls(drawn())

    def begin(self, scheduler: Scheduler) -> FaultInjector:
        """Start injecting the faults into a scheduler's workers, which need not exist yet.

        Args:
            scheduler: Scheduler of the workers.

        Returns:
            The injector; call its ``step`` at each step of the script.

        Raises:
            FaultsUnsupportedError: The plan has faults, and the workers are not processes.
        """
        return FaultInjector(self.faults, scheduler)

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FaultPlan) and self.faults == other.faults

    def __hash__(self) -> int:
        return hash(self.faults)
