"""Calls of many kinds to workers that are killed at random, checked against what engines record.

    python -m tests.hostile.mixed_calls --backend local --calls 100000
    python -m tests.hostile.mixed_calls --backend ray --minutes 30

After each window of calls the record, a file that the engines append to before they do anything, is
compared with the outcomes: no call without an outcome, none executed twice, no wrong value. The
driver's and the workers' memory and descriptors are taken at the same time, when nothing is in
flight. The exit code is 1 if a call is lost, doubled or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from helmsman import make_scheduler
from helmsman.api.errors import CallTimeoutError, EngineCallError, HelmsmanError
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from tests.hostile.victims import result_of

NUM_WORKERS = 3
NUM_CONCURRENT = 24
WINDOW = 2_000
"""Calls between two checks."""
MEAN_GAP = 400
"""Mean number of calls between two kills."""
LOST_S = 60.0
"""Time after which a call without an outcome counts as lost."""
ENGINE = "tests.hostile.mixed_calls.Recorder"
_NUMBER = struct.Struct("<q")


class Recorder:
    """Append the number of each call to a file, then execute it."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _note(self, number: int) -> None:
        os.write(self._file, _NUMBER.pack(number))

    def small(self, number: int) -> int:
        self._note(number)
        return result_of(number)

    async def concurrent(self, number: int) -> int:
        self._note(number)
        await asyncio.sleep(0.001)
        return result_of(number)

    def large(self, number: int, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self._note(number)
        return data + number

    def refuse(self, number: int) -> None:
        self._note(number)
        raise ValueError(f"call {number} fails")

    def late(self, number: int) -> int:
        self._note(number)
        time.sleep(0.05)
        return result_of(number)

    def kept(self, number: int) -> np.ndarray[Any, Any]:
        self._note(number)
        return np.full(1_000, number)

    def total(self, number: int, data: np.ndarray[Any, Any]) -> int:
        self._note(number)
        return int(data.sum())


class Usage(NamedTuple):
    """Memory and descriptors of the driver and of all workers."""

    driver_mb: float
    driver_fds: int
    worker_mb: float
    worker_fds: int


class Mix:
    """One run of a seed.

    Args:
        scheduler: Scheduler of the workers.
        folder: Folder of the record.
        seed: Seed of kinds, workers and kills.
    """

    def __init__(self, scheduler: Scheduler, folder: Path, seed: int) -> None:
        self._scheduler, self._record = scheduler, folder / "executed"
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._workers = scheduler.create_workers(
            Job(role="mix", replicas=NUM_WORKERS, tasks=[SchedulingSpec(cpu=0.1)])
        )
        scheduler.create_engines(self._workers, ENGINE, None, str(self._record))
        self._ready = {worker: asyncio.Event() for worker in self._workers}
        for event in self._ready.values():
            event.set()
        self._pids = self._found_pids()
        self._until_kill = self._gap()
        self._restarts: set[asyncio.Task[None]] = set()
        self._replied: set[int] = set()
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_kills = 0

    async def window(self) -> None:
        """Make WINDOW calls, wait for their outcomes, and compare them with the record."""
        left = iter(range(WINDOW))

        async def caller() -> None:
            for _ in left:
                await self._one()

        await asyncio.gather(*(caller() for _ in range(NUM_CONCURRENT)))
        while self._restarts:
            await asyncio.gather(*self._restarts)
        self._check()

    def usage(self) -> Usage:
        """Return the current usage; nothing is in flight."""
        gc.collect()
        driver = psutil.Process()
        worker_mb, worker_fds = 0.0, 0
        for pid in self._pids.values():
            with contextlib.suppress(psutil.NoSuchProcess):  # the window ended with a kill
                process = psutil.Process(pid)
                worker_mb += process.memory_info().rss / 1e6
                worker_fds += process.num_fds()
        return Usage(driver.memory_info().rss / 1e6, driver.num_fds(), worker_mb, worker_fds)

    async def _one(self) -> None:
        kind = self._random.choices(
            (self._small, self._concurrent, self._sync, self._large, self._refuse, self._late,
             self._passed),
            (60, 60, 20, 5, 10, 1, 3),
        )[0]  # fmt: skip
        worker = self._random.choice(self._workers)
        await self._ready[worker].wait()
        number = next(self._numbers)
        name = kind.__name__.lstrip("_")
        try:
            async with asyncio.timeout(LOST_S):
                is_right = await kind(worker, number)
        except TimeoutError as error:
            if isinstance(error, HelmsmanError):
                self._failed(worker, name, error)
            else:
                self.faults.append(f"call {number} ({name}) to {worker} has no outcome")
        except HelmsmanError as error:
            self._failed(worker, name, error)
        else:
            self.outcomes[f"{name}: replied"] += 1
            self._replied.add(number)
            if not is_right:
                self.faults.append(f"call {number} ({name}) has a wrong value")
        self._until_kill -= 1
        if self._until_kill <= 0:
            self._until_kill = self._gap()
            self._kill()

    def _failed(self, worker: str, name: str, error: HelmsmanError) -> None:
        self.outcomes[f"{name}: {type(error).__name__}"] += 1
        is_alive = isinstance(error, EngineCallError | CallTimeoutError)
        if not is_alive and self._ready[worker].is_set():
            self._restart(worker)

    def _kill(self) -> None:
        worker = self._random.choice(self._workers)
        if self._ready[worker].is_set():
            self.num_kills += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[worker], signal.SIGKILL)

    def _restart(self, worker: str) -> None:
        async def restart() -> None:
            await asyncio.to_thread(self._scheduler.restart_worker, worker)
            await self._scheduler.create_engine(worker, ENGINE, None, str(self._record))
            self._pids = await asyncio.to_thread(self._found_pids)
            self._ready[worker].set()

        self._ready[worker].clear()
        task = asyncio.create_task(restart())
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    def _found_pids(self) -> dict[str, int]:
        return {each.worker_id: each.pid for each in self._scheduler.status() if each.pid}

    def _gap(self) -> int:
        return 1 + int(self._random.expovariate(1 / MEAN_GAP))

    def _check(self) -> None:
        data = self._record.read_bytes() if self._record.exists() else b""
        executed = Counter(number for (number,) in _NUMBER.iter_unpack(data))
        self.faults += [
            f"call {number} was executed {times} times"
            for number, times in executed.items()
            if times > 1
        ]
        self.faults += [
            f"call {number} was answered, but not executed"
            for number in self._replied - {*executed}
        ]
        self._replied.clear()
        os.truncate(self._record, 0)

    # --- kinds of calls; each returns whether the value is right ---------------------------------

    async def _call(self, worker: str, method: str, number: int, *args: Any, **options: Any) -> Any:
        return await self._scheduler.async_call_engine(
            worker, method, None, number, *args, **options
        )

    async def _small(self, worker: str, number: int) -> bool:
        return bool(await self._call(worker, "small", number) == result_of(number))

    async def _concurrent(self, worker: str, number: int) -> bool:
        return bool(await self._call(worker, "concurrent", number) == result_of(number))

    async def _sync(self, worker: str, number: int) -> bool:
        found = await asyncio.to_thread(self._scheduler.call_engine, worker, "small", None, number)
        return bool(found == result_of(number))

    async def _large(self, worker: str, number: int) -> bool:
        data = np.arange(self._random.choice((10_000, 100_000, 500_000)))
        return bool((await self._call(worker, "large", number, data) == data + number).all())

    async def _refuse(self, worker: str, number: int) -> bool:
        try:
            await self._call(worker, "refuse", number)
        except EngineCallError as error:
            if f"call {number} fails" not in str(error):
                raise
            return True
        return False

    async def _late(self, worker: str, number: int) -> bool:
        found = await self._call(worker, "late", number, rpc_timeout=0.02)
        return bool(found == result_of(number))  # the machine was slow, not the call

    async def _passed(self, worker: str, number: int) -> bool:
        """Keep a result in one worker and pass it to another."""
        handle = await self._call(worker, "kept", number, rpc_meta={"keep": True})
        try:
            other = self._random.choice(self._workers)
            await self._ready[other].wait()
            try:
                found = await self._call(other, "total", next(self._numbers), handle)
            except HelmsmanError as error:
                self._failed(other, "total", error)
                return True
            return bool(found == 1_000 * number)
        finally:
            with contextlib.suppress(HelmsmanError):
                await asyncio.to_thread(self._scheduler.release, handle)


async def run(
    scheduler: Scheduler,
    folder: Path,
    seed: int,
    is_over: Callable[[int], bool],
    report: Callable[[int, Mix], Awaitable[None]] | None = None,
) -> Mix:
    """Play windows until ``is_over``, which gets the number of calls, and return the mix."""
    mix = Mix(scheduler, folder, seed)
    num_calls = 0
    while not is_over(num_calls) and not mix.faults:
        await mix.window()
        num_calls += WINDOW
        if report is not None:
            await report(num_calls, mix)
    return mix


def main() -> int:
    """Run from the command line, with a line of usage for each window."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="local", choices=("local", "ray"))
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    begin = time.monotonic()

    def is_over(num_calls: int) -> bool:
        return num_calls >= args.calls and time.monotonic() - begin >= 60 * args.minutes

    async def report(num_calls: int, mix: Mix) -> None:
        usage = mix.usage()
        print(
            f"{time.monotonic() - begin:7.1f} s  {num_calls:8d} calls  {mix.num_kills:4d} kills  "
            f"driver {usage.driver_mb:7.1f} MB {usage.driver_fds:4d} fds  "
            f"workers {usage.worker_mb:7.1f} MB {usage.worker_fds:4d} fds",
            flush=True,
        )

    options = {"address": "local", "num_cpus": 2} if args.backend == "ray" else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        make_scheduler(args.backend, **options) as scheduler,
    ):
        mix = asyncio.run(run(scheduler, Path(folder), args.seed, is_over, report))
    for outcome, times in sorted(mix.outcomes.items()):
        print(f"{times:8d}  {outcome}")
    print("\n".join(mix.faults) or "no call is lost, doubled or wrong")
    return int(bool(mix.faults))


if __name__ == "__main__":
    sys.exit(main())
