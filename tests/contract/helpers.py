"""What the contract tests share: waiting for conditions, engines as objects, drivers as scripts, what a run leaves behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman.api.scheduler import Scheduler
from helmsman.controller._aio.event_loop import submit
from helmsman.rpc_server._process import guardian

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
"""How long a test waits for what must come; a failure and not a measure."""


def has_stopped(pid: int) -> bool:
    """Whether no thread of it runs any more: SIGSTOP reaches them one after another."""
    states = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            states.append(path.read_text().rpartition(")")[2].split()[0])
    return set(states) == {"T"}


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it stands still."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: has_stopped(pid), f"all threads of process {pid} have stopped")


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Wait until ``condition`` gives something true and return it; fail with ``what`` when it does not."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {limit_s:g} s: {what}", pytrace=False)
        time.sleep(0.01)
    return value


class Engine:
    """An engine in a worker, for short tests."""

    def __init__(self, scheduler: Scheduler, worker_id: str, name: str) -> None:
        self.scheduler = scheduler
        self.worker_id = worker_id
        self.name = name

    @classmethod
    def create(cls, scheduler: Scheduler, worker_id: str, engine: Any, name: str | None = None, *args: Any) -> Engine:
        """Create it and return it."""
        asyncio.run(scheduler.create_engine(worker_id, engine, name, *args))
        return cls(scheduler, worker_id, name or worker_id)

    def call(self, method: str, *args: Any, timeout: float = LIMIT_S, **kwargs: Any) -> Any:
        """Call a method."""
        return self.scheduler.call_engine(self.worker_id, method, self.name, *args, timeout=timeout, **kwargs)

    def acall(self, method: str, *args: Any, timeout: float = LIMIT_S, **kwargs: Any) -> Any:
        """The coroutine of a call."""
        return self.scheduler.async_call_engine(self.worker_id, method, self.name, *args, timeout=timeout, **kwargs)

    def begin(self, method: str, *args: Any, timeout: float = LIMIT_S, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Start a call and return its future."""
        return submit(self.acall(method, *args, timeout=timeout, **kwargs))


class Gate:
    """Two files by which a test holds an engine inside a call: the engine makes one, the test the other."""

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.started = str(folder / f"{name}-started")
        self.release = str(folder / f"{name}-release")

    @property
    def files(self) -> tuple[str, str]:
        """Arguments of the engines' waiting methods."""
        return self.started, self.release

    def wait_started(self) -> None:
        """Wait until the engine is inside."""
        wait_until(lambda: os.path.exists(self.started), "the engine began its call")

    def open(self) -> None:
        """Let the engine go on. Idempotent."""
        Path(self.release).touch()


@contextlib.contextmanager
def held(
    engine: Engine, gate: Gate, method: str = "wait", timeout: float = LIMIT_S
) -> Iterator[concurrent.futures.Future[Any]]:
    """Hold an engine inside a call; it is let go at the end, whatever happens."""
    future = engine.begin(method, *gate.files, timeout=timeout)
    try:
        gate.wait_started()
        yield future
    finally:
        gate.open()


# --- processes ----------------------------------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids: dict[str, int], limit_s: float = 10.0) -> None:
    """Wait until all these processes have ended; fail with the names of those that have not."""
    deadline = time.monotonic() + limit_s
    while left := {name: pid for name, pid in pids.items() if is_running(pid)}:
        if time.monotonic() > deadline:
            for pid in left.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pytest.fail(f"still there after {limit_s:g} s (now killed): {left}", pytrace=False)
        time.sleep(0.02)


def has_shared_memory(names: Iterable[str]) -> bool:
    """Whether one of these segments of multiprocessing.shared_memory exists."""
    return any(os.path.exists(f"/dev/shm/{name.lstrip('/')}") for name in names)


def processes_with(variable: str, value: str) -> dict[str, int]:
    """Processes with this variable in their environment, by command line."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found[f"{process.pid}: {' '.join(process.cmdline())[:120]}"] = process.pid
        except psutil.Error:
            continue
    return found


WITH_FAMILY = """
scheduler = make()
scheduler.create_workers(Job(role="family", replicas=2))
pids, memory = {}, []
for index in range(2):
    own = os.path.join(folder, str(index))
    os.mkdir(own)
    asyncio.run(scheduler.create_engine(f"family/{index}", engines.Family, None, own))
    started = scheduler.call_engine(f"family/{index}", "start", timeout=60)
    pids |= {f"{name} of {index}": pid for name, pid in started.items()}
    memory.append(scheduler.call_engine(f"family/{index}", "share_memory"))
tell(pids=pids, memory=memory)
"""
"""A script of a Driver: two workers with a family and a segment of shared memory each."""

WAIT = """
while True:
    time.sleep(3600)
"""
"""The end of a script that waits for a signal."""


class Driver:
    """A script in a process group of its own, with a temporary folder of its own, that tells its state as JSON lines.

    Args:
        script: Python source. It may use ``tell(**facts)``, ``folder`` and ``make()`` (a scheduler of ``backend``).
    """

    def __init__(self, folder: Path, backend: str, script: str, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        # Short: the path of a Unix socket has 107 bytes, and Ray's own ones lie below it.
        self.temporary = tempfile.TemporaryDirectory(prefix="hc-")
        self.mark = os.urandom(8).hex()
        source = _PROLOGUE.format(backend=backend, folder=str(folder)) + script
        self.source = folder / "driver.py"
        self.source.write_text(source)
        self.before = set(os.listdir("/dev/shm"))
        self.process = subprocess.Popen(
            [sys.executable, str(self.source)],
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("w"),
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": self.temporary.name,
                "RAY_TMPDIR": self.temporary.name,
                "HELMSMAN_DRIVER_MARK": self.mark,
                **(environment or {}),
            },
        )

    def facts(self) -> dict[str, Any]:
        """The next line that the script tells."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        code = self.process.wait()
        pytest.fail(f"the driver ended with {code} before it told anything:\n{self.errors()}", pytrace=False)

    def errors(self) -> str:
        """What it wrote to stderr."""
        return (self.folder / "stderr").read_text()

    def wait(self, limit_s: float = 60.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the driver did not end within {limit_s:g} s:\n{self.errors()}", pytrace=False)

    def wait_nothing_left(self, limit_s: float = 10.0) -> None:
        """Fail unless every process, socket, folder and shared memory of the run is gone within the limit."""
        deadline = time.monotonic() + limit_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self._kill_all()
            pytest.fail(f"left behind {limit_s:g} s after the driver's end: {left}\n{self.errors()}", pytrace=False)

    def left(self) -> list[str]:
        """What the run has not cleaned up yet. Logs are meant to stay; Ray keeps those of its session too."""
        walked = os.walk(self.temporary.name)  # unlike rglob, it goes on where a folder is removed meanwhile
        paths = [Path(folder, name) for folder, _, names in walked for name in names]
        sockets = [str(path) for path in paths if path.suffix == ".sock" and "ray" not in path.parts]
        run_dirs = [name for name in os.listdir(self.temporary.name) if _is_run_dir(name)]
        shared = [name for name in set(os.listdir("/dev/shm")) - self.before if self._is_ours(name)]
        return list(processes_with("HELMSMAN_DRIVER_MARK", self.mark)) + sockets + run_dirs + shared

    def _is_ours(self, name: str) -> bool:
        # Other suites run beside this one on the same machine; what is named after a process tells whose it is.
        return "helmsman" in name or str(self.process.pid) in name

    def close(self) -> None:
        """End whatever is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._kill_all()
        self.temporary.cleanup()

    def _kill_all(self) -> None:
        pids = processes_with("HELMSMAN_DRIVER_MARK", self.mark).values()
        runs = {mark.run_id for pid in pids if (mark := guardian.mark_of(pid)) is not None}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for run_id in runs:  # those that hide have an empty environment, and their guardians were killed just now
            guardian.end_all(functools.partial(guardian.run_members, run_id))


def _is_run_dir(name: str) -> bool:
    return name.startswith("helmsman-") and "-" in name[len("helmsman-") :]


_PROLOGUE = """
import asyncio, json, os, signal, sys, time
from helmsman import Job, SchedulingSpec, Timeouts, make_scheduler
from helmsman.api import errors
from tests.contract import engines

backend, folder = {backend!r}, {folder!r}


def tell(**facts):
    print(json.dumps(facts), flush=True)


def make(**options):
    if backend == "ray":
        options = {{"num_cpus": 4, **options}}
    return make_scheduler(backend, log_dir=os.path.join(folder, "logs"), **options)


"""
