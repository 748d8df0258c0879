"""Helpers of the contract tests: driver scripts, and checks of processes and files."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman._base.event_loop import submit
from helmsman._process import guardian
from helmsman.api.scheduler import Call, Job, Scheduler, SchedulingStrategy
from helmsman.controller._groups.call_all import call_all
from helmsman.controller._scheduler.backend_scheduler import BackendScheduler
from helmsman.testing.contract_tools import LIMIT_S, Engine, Gate, held, is_running, wait_until

__all__ = ["LIMIT_S", "Engine", "Gate", "held", "is_running", "wait_until"]

ROOT = Path(__file__).resolve().parents[2]


def has_stopped(pid: int) -> bool:
    """Return whether all threads of a process have stopped; SIGSTOP stops one after another."""
    states = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            states.append(path.read_text().rpartition(")")[2].split()[0])
    return set(states) == {"T"}


def stop(pid: int) -> None:
    """Stop a process by SIGSTOP and wait until all of its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: has_stopped(pid), f"all threads of process {pid} have stopped")


def wait_gone(pids: dict[str, int], limit_s: float = 10.0) -> None:
    """Wait until these processes have ended; fail with the names of those that run."""
    deadline = time.monotonic() + limit_s
    while left := {name: pid for name, pid in pids.items() if is_running(pid)}:
        if time.monotonic() > deadline:
            for pid in left.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pytest.fail(f"still running after {limit_s:g} s (now killed): {left}", pytrace=False)
        time.sleep(0.02)


def alias_of(target: str, role: str, replicas: int = 1, *, fork: bool = False) -> Job:
    """Make the job of a role that is colocated with the workers of another."""
    strategy = SchedulingStrategy(type="colocation", target=target, fork=fork)
    return Job(role=role, replicas=replicas, scheduling_strategy=strategy)


def run_id(scheduler: Scheduler) -> str:
    """Return the id of the run."""
    assert isinstance(scheduler, BackendScheduler)
    return scheduler.run_id


def answers(port: int) -> bool:
    """Return whether a server accepts connections at a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5.0):
        return True
    return False


FORMS = ("sync", "async", "group")
"""The forms of a call that enforce a timeout."""


def begin_as(
    form: str, engine: Engine, method: str, *args: object, timeout: float
) -> concurrent.futures.Future[Any]:
    """Begin a call in one of the forms; the result of "group" is a list."""
    if form == "async":
        return engine.begin(method, *args, timeout=timeout)
    if form == "sync":
        return submit(asyncio.to_thread(lambda: engine.call(method, *args, timeout=timeout)))
    calls = {engine.worker_id: Call(args)}
    role, name = engine.worker_id.rpartition("/")[0], engine.name
    return submit(
        call_all(engine.scheduler, role, method, calls, engine_name=name, timeout=timeout)
    )


@contextlib.contextmanager
def interrupted_when(condition: Callable[[], Any], what: str) -> Iterator[None]:
    """Send SIGINT to the main thread once ``condition()`` is true; require KeyboardInterrupt."""

    def interrupt() -> None:
        wait_until(condition, what)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


def has_shared_memory(names: Iterable[str]) -> bool:
    """Return whether one of these segments of multiprocessing.shared_memory exists."""
    return any(os.path.exists(f"/dev/shm/{name.lstrip('/')}") for name in names)


def processes_with(variable: str, value: str) -> dict[str, int]:
    """Return the processes with this variable in their environment, by command line."""
    found = {}
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(variable) == value
                and process.status() != psutil.STATUS_ZOMBIE
            ):
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
    started = scheduler.call_engine(f"family/{index}", "start", rpc_timeout=60)
    pids |= {f"{name} of {index}": pid for name, pid in started.items()}
    memory.append(scheduler.call_engine(f"family/{index}", "share_memory"))
tell(pids=pids, memory=memory)
"""
"""Script of a Driver: two workers, each with a Family and a segment of shared memory."""

WAIT = """
while True:
    time.sleep(3600)
"""
"""End of a script that waits for a signal."""


class Driver:
    """A script in its own process group, with its own temporary folder.

    Args:
        folder: Folder of the script, its logs and its stderr.
        backend: Name of the scheduler that ``make()`` returns.
        script: Python source. It may use ``folder``, ``make()``, and ``tell(**facts)``, which
            prints a line of JSON for ``facts()``.
        environment: Further environment variables.
    """

    def __init__(
        self, folder: Path, backend: str, script: str, environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        # Short, since the path of a Unix socket has 107 bytes, and Ray adds folders of its own.
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
        """Return the next facts that the script prints."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        code = self.process.wait()
        pytest.fail(
            f"the driver ended with {code} before it printed facts:\n{self.errors()}", pytrace=False
        )

    def errors(self) -> str:
        """Return its stderr."""
        return (self.folder / "stderr").read_text()

    def wait(self, limit_s: float = 60.0) -> int:
        """Wait for its end and return its exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"the driver did not end within {limit_s:g} s:\n{self.errors()}", pytrace=False
            )

    def wait_nothing_left(self, limit_s: float = 10.0) -> None:
        """Fail if a process, socket, folder or segment of the run is left at the limit."""
        deadline = time.monotonic() + limit_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self._kill_all()
            pytest.fail(
                f"left behind {limit_s:g} s after the driver's end: {left}\n{self.errors()}",
                pytrace=False,
            )

    def left(self) -> list[str]:
        """Return the processes and files that the run has left, except logs."""
        # Unlike rglob, os.walk continues when a folder is removed meanwhile.
        walked = os.walk(self.temporary.name)
        paths = [Path(folder, name) for folder, _, names in walked for name in names]
        sockets = [
            str(path) for path in paths if path.suffix == ".sock" and "ray" not in path.parts
        ]
        run_dirs = [name for name in os.listdir(self.temporary.name) if _is_run_dir(name)]
        shared = [name for name in set(os.listdir("/dev/shm")) - self.before if self._is_ours(name)]
        return list(processes_with("HELMSMAN_DRIVER_MARK", self.mark)) + sockets + run_dirs + shared

    def _is_ours(self, name: str) -> bool:
        # Other tests run on this machine: names have the pid of their owner, and no driver here
        # starts inference servers, which own the weights.
        is_of_a_server = name.startswith("helmsman-weights.")
        return ("helmsman" in name and not is_of_a_server) or str(self.process.pid) in name

    def close(self) -> None:
        """Kill all processes of the run."""
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
        for run_id in runs:
            # Some have an empty environment, and their guardians have just been killed.
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
    if backend != "inline":
        options = {{"preload": (), **options}}  # Importing torch takes seconds.
    if backend == "ray":
        options = {{"num_cpus": 4, **options}}
    return make_scheduler(backend, log_dir=os.path.join(folder, "logs"), **options)


"""
