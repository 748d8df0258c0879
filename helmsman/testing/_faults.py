"""Fault injection: plans that kill or stop workers at given steps of a script."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import msgspec

from helmsman.api.errors import FaultsUnsupportedError, HelmsmanError
from helmsman.api.scheduler import Scheduler, WorkerState, WorkerStatus

log = logging.getLogger(__name__)


class _Fault(msgspec.Struct, frozen=True):
    worker_id: str
    """'role/index'."""
    at_step: int
    """The script's step number, as passed to FaultInjector.step."""

    def __post_init__(self) -> None:
        role, _, index = self.worker_id.rpartition("/")
        if not role or not index.isdecimal():
            raise ValueError(
                f"a fault is aimed at {self.worker_id!r}; expected a worker's id, 'role/index'"
            )
        if self.at_step < 0:
            raise ValueError(
                f"a fault of {self.worker_id} is at step {self.at_step}; expected 0 or more"
            )


class Kill(_Fault, frozen=True, tag=True):
    """The scheduler kills the worker's process, on any node; see ``Scheduler.kill_worker``."""

    def __str__(self) -> str:
        return f"kill {self.worker_id} at step {self.at_step}"


class Hang(_Fault, frozen=True, tag=True):
    """SIGSTOP stops the worker's process: it does not answer, and has not ended.

    The script sends the signal, so only workers on its own machine can be stopped.
    """

    seconds: float | None = None
    """Time after which the script continues the process by SIGCONT; None: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None and not 0 < self.seconds < threading.TIMEOUT_MAX:
            raise ValueError(
                f"seconds is {self.seconds:g} in a fault of {self.worker_id}; expected more than 0 "
                f"and less than {threading.TIMEOUT_MAX:g}"
            )

    @property
    def _time(self) -> str:
        return "" if self.seconds is None else f" for {self.seconds:g} s"

    def __str__(self) -> str:
        return f"hang {self.worker_id} at step {self.at_step}{self._time}"


Fault: TypeAlias = Kill | Hang

_KINDS: Mapping[str, Callable[..., Fault]] = {"kill": Kill, "hang": Hang}


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a fault."""

    at: float
    """Time of the injection, in seconds since the epoch."""
    step: int
    """Step of the script at which the fault was injected."""
    fault: Fault
    pid: int | None
    """The worker's process; None if there is none."""
    node: str
    """Address of its node; '' if there is none."""
    done: bool
    """Whether the fault was injected."""
    outcome: str
    """The effect, or the reason why the fault was not injected, for messages."""

    def __str__(self) -> str:
        what = self.outcome if self.done else f"nothing done, {self.outcome}"
        where = f" (pid {self.pid} on {self.node})" if self.pid is not None else ""
        return f"{self.fault}{where}: {what}"


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
        workers = {}
        if due:  # In a thread, since it blocks.
            workers = {each.worker_id: each for each in await asyncio.to_thread(self._status)}
        new = await asyncio.gather(
            *(self._inject(fault, step, workers.get(fault.worker_id)) for fault in due)
        )
        for record in new:
            log.log(logging.INFO if record.done else logging.WARNING, "drill: %s", record)
        self.record += new
        return new

    def _status(self) -> list[WorkerStatus]:
        try:
            return self._scheduler.status()
        except HelmsmanError:  # A drill does not end the run.
            return []

    async def _inject(self, fault: Fault, step: int, worker: WorkerStatus | None) -> FaultRecord:
        done = False
        try:
            if worker is None:
                outcome = f"there is no worker {fault.worker_id!r}"
            elif worker.pid is None or worker.state in (WorkerState.STOPPED, WorkerState.FAILED):
                outcome = "it had already ended"
            elif isinstance(fault, Kill):
                await self._scheduler.kill_worker(fault.worker_id, "was killed by a drill")
                done, outcome = True, "killed"
            elif worker.health is not None and worker.health.process_state == "stopped":
                outcome = "it was stopped already"
            else:
                _stop(worker.pid, worker.log_path, fault.seconds)
                done, outcome = True, f"stopped{fault._time or ' until its end'}"
        except (HelmsmanError, OSError) as error:
            outcome = str(error)
        return FaultRecord(
            at=time.time(),
            step=step,
            fault=fault,
            pid=worker.pid if worker is not None else None,
            node=worker.node if worker is not None else "",
            done=done,
            outcome=outcome,
        )


def _stop(pid: int, log_path: str, seconds: float | None) -> None:
    """Stop a worker's process on this machine, and continue it after ``seconds``.

    Raises:
        HelmsmanError: The worker runs on another machine.
        OSError: The process has ended.
    """
    with contextlib.ExitStack() as stack:
        is_here = False
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)
            stack.callback(os.close, process)
            # Another process may have this pid here, if the worker runs elsewhere.
            is_here = os.path.samefile(f"/proc/{pid}/fd/1", log_path)
        if not is_here:
            raise HelmsmanError(
                f"no process {pid} of this machine writes to its log, and the script can stop only "
                "workers on its own machine"
            )
        signal.pidfd_send_signal(process, signal.SIGSTOP)
        if seconds is not None:
            timer = threading.Timer(seconds, _continue, (process, stack.pop_all()))
            timer.daemon = True
            timer.start()


def _continue(process: int, closing: contextlib.ExitStack) -> None:
    with closing, contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGCONT)


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
    ) -> FaultPlan:
        """Draw a random plan; the same arguments give the same plan on every machine.

        Args:
            seed: Seed of the random generator.
            workers: Ids of the workers that may be hit, each equally likely.
            steps: Number of steps of the script, numbered from 1.
            rates: Probability per step, 0 to 1, of each kind: 'kill', 'hang'.
            seconds: Shortest and longest duration of a hang, in seconds.

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

        def drawn() -> Iterator[Fault]:
            for step in range(1, steps + 1):
                for kind, make in _KINDS.items():
                    # All is drawn in any case, so that a rate affects only its own kind.
                    hits, place, time_s = (source.random() for _ in range(3))
                    lasts = round(seconds[0] + (seconds[1] - seconds[0]) * time_s, 3)
                    more = {"seconds": lasts} if kind == "hang" else {}
                    if hits < rates.get(kind, 0.0):
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
