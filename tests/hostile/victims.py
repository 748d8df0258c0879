"""The script of a kill round, and engines that hide children and record each executed call."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helmsman.api.errors import HelmsmanError
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, Timeouts
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.unit.controller.rollout.pure_rollout import PureRollout

NUM_CALLS = 20
NUM_UPDATES = 6
NUM_PARAMETERS = 1 << 19
TIMEOUTS = Timeouts(start_s=60.0, create_engine_s=60.0, call_s=4.0, health_s=1.0, shutdown_s=6.0)
"""Each call to a stopped worker takes ``call_s``; a script has a call phase and six syncs."""
SPEC = SchedulingSpec(cpu=0.1)
WORKERS = ["train/0", "train/1"]

_HIDE = (
    "import os, sys, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
    "os.closerange(0, 1000); "
    "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT); os.write(fd, "
    "open('/proc/self/stat', 'rb').read()); "
    "os.close(fd); time.sleep(600)"
)


def note(path: str | Path, line: str) -> None:
    """Append a line to a file at once, so that a kill of this process leaves no part of it."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


def result_of(number: int) -> int:
    """Return the right result of a call."""
    return number * number + 1


class Hiding:
    """Hides two children and creates a segment of shared memory, at its creation and in each call.

    Args:
        folder: Folder for its records: rows of the process table of its children, names of its
            segments, and executed calls.
        hides: Whether it has children and segments, False in the script's own process.
    """

    def __init__(self, folder: str, hides: bool) -> None:
        self.folder, self.hides = folder, hides
        self.memory: list[Any] = []
        self.hide()

    def hide(self) -> None:
        """Start a daemon with an empty environment, and a forked one without descriptors."""
        if not self.hides:
            return
        from multiprocessing import shared_memory

        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _HIDE, f"{self.folder}/pids"], env={}, check=True
        )
        child = os.fork()
        if child == 0:
            os.setsid()
            try:
                if os.fork() == 0:
                    os.closerange(0, 1000)
                    note(f"{self.folder}/pids", Path("/proc/self/stat").read_text().strip())
                    time.sleep(600)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        self.memory.append(shared_memory.SharedMemory(create=True, size=4096))
        note(f"{self.folder}/memory", self.memory[-1].name)

    def work(self, number: int) -> int:
        """Execute a call."""
        note(f"{self.folder}/executed", f"call {number}")
        if number % 5 == 0:
            self.hide()
        time.sleep(0.002 * (number % 7))
        return result_of(number)

    def export(self, version: int) -> dict[str, Any]:
        """Weights of a version."""
        return {"version": version, "weight": np.full(NUM_PARAMETERS, float(version))}


class HidingRollout(PureRollout):
    """A rollout engine that hides children, and records its updates."""

    def __init__(self, folder: str, hides: bool) -> None:
        super().__init__(0.001)
        self.folder = folder
        self.hiding = Hiding(folder, hides)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> int:
        """Accept weights, and record mixed ones."""
        note(f"{self.folder}/executed", f"update {version} {id(self)} {os.getpid()}")
        if not (weights["weight"] == float(version)).all():
            note(f"{self.folder}/wrong", f"weights of version {version} are mixed")
        return await super().update_weights(weights, version)


class Script:
    """The controller of a round, which continues when a worker fails: start, calls, weight syncs,
    delete, close.

    Args:
        tell: Reports the beginning of a phase.
    """

    def __init__(
        self, scheduler: Scheduler, folder: str, hides: bool, tell: Callable[..., None]
    ) -> None:
        self.scheduler, self.folder, self.tell = scheduler, folder, tell
        self.arguments = (folder, hides)

    def run(self) -> None:
        """Run all phases."""
        self.tell(run_id=self.scheduler.run_id)  # type: ignore[attr-defined]
        job = Job(role="rollout", replicas=2, tasks=[SPEC])
        engine = "tests.hostile.victims.HidingRollout"
        rollout = RolloutController(self.scheduler, engine, job, engine_args=self.arguments)
        self.scheduler.create_workers(Job(role="train", replicas=2, tasks=[SPEC]))
        rollout.initialize()
        asyncio.run(self.create())
        pids = {status.worker_id: status.pid for status in self.scheduler.status()}
        self.tell(phase="call", pids=pids)
        asyncio.run(self.calls())
        self.tell(phase="weights")
        for version in range(1, NUM_UPDATES + 1):
            self.attempt(f"update {version}", lambda version=version: self.sync(rollout, version))  # type: ignore[misc]
        self.tell(phase="delete")
        self.attempt("delete", lambda: self.scheduler.delete_workers("train"))
        self.tell(phase="close")
        self.scheduler.close()

    async def create(self) -> None:
        """Create an engine in each trainer."""
        await asyncio.gather(
            *(
                self.scheduler.create_engine(worker, Hiding, None, *self.arguments)
                for worker in WORKERS
            )
        )

    async def calls(self) -> None:
        """Call both workers at once, and compare the results."""

        async def call(number: int) -> None:
            worker = WORKERS[number % 2]
            note(f"{self.folder}/sent", f"call {number}")
            try:
                value = await self.scheduler.async_call_engine(worker, "work", None, number)
            except HelmsmanError as error:
                note(f"{self.folder}/outcomes", f"call {number}: {type(error).__name__}")
                return
            note(f"{self.folder}/outcomes", f"call {number}: replied")
            if value != result_of(number):
                note(f"{self.folder}/wrong", f"call {number} returned {value}")

        await asyncio.gather(*map(call, range(NUM_CALLS)))

    def sync(self, rollout: RolloutController, version: int) -> None:
        """Send weights from the first trainer to the rollout directly."""
        handle = self.scheduler.call_engine(
            "train/0", "export", None, version, rpc_meta={"keep": True}
        )
        try:
            rollout.update_weights(handle, version)
        finally:
            self.scheduler.release(handle)

    def attempt(self, name: str, operation: Callable[[], object]) -> None:
        """Run an operation that fails when a worker was killed, and record its outcome."""
        note(f"{self.folder}/sent", name)
        try:
            operation()
        except (HelmsmanError, ExceptionGroup) as error:
            note(f"{self.folder}/outcomes", f"{name}: {type(error).__name__}")
        else:
            note(f"{self.folder}/outcomes", f"{name}: replied")
