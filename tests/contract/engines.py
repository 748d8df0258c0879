"""Engines of the contract tests; imports at the top are light, so that workers start fast."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import functools
import itertools
import mmap
import operator
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from helmsman.testing.contract_engine import CountingEngine, wait_for_file

_MOST_LOOKS = 2_000_000_000
"""Limit of hold_interpreter, so that a failed test leaves no process that computes for ever."""


def hold_interpreter(started: str) -> None:
    """Write the file ``started``, then hold the interpreter's lock until it changes.

    Neither the iterator nor its function is Python code, so no other thread gets the lock.
    """
    Path(started).write_bytes(b"0")
    with open(started, "rb") as file, mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ) as page:
        looks = iter(functools.partial(operator.getitem, page, 0), ord("1"))
        collections.deque(itertools.islice(looks, _MOST_LOOKS), maxlen=0)


def release_interpreter(started: str) -> None:
    """End hold_interpreter of another process."""
    with open(started, "r+b") as file:
        file.write(b"1")


_held: list[bytearray] = []


def hold_memory(num_bytes: int) -> None:
    """Keep that many resident bytes until the process ends."""
    _held.append(bytearray(b"1") * num_bytes)


class Counter(CountingEngine):
    """An engine that counts its calls, with methods for faults and payloads."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.destroyed = ""

    def note_number(self, index: int, _: Any) -> None:
        self.log.append(str(index))

    def numbers(self) -> list[int]:
        return [int(index) for index in self.log]

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    async def park(self) -> None:
        """Wait for unpark without using the processor."""
        self.parked = getattr(self, "parked", None) or asyncio.Event()
        await self.parked.wait()

    async def unpark(self) -> None:
        self.parked.set()

    def hold_interpreter(self, started: str, release: str) -> None:
        """Hold the interpreter's lock until ``release_interpreter(started)``."""
        hold_interpreter(started)

    async def async_hold_interpreter(self, started: str, release: str) -> None:
        hold_interpreter(started)

    def sleep_with_interpreter(self, seconds: float) -> None:
        """Sleep in C code with the interpreter's lock held."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    async def block_loop(self, started: str, release: str) -> None:
        """Block the event loop until ``release`` exists."""
        Path(started).touch()
        wait_for_file(release)

    def refuse_threads(self) -> None:
        """Leave less address space than the stack of a new Python thread needs."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), most))
        threading.stack_size(4 << 30)

    def allow_threads(self) -> None:
        threading.stack_size(0)
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def environ(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def _secret(self) -> None: ...

    @functools.cached_property
    def broken_once(self) -> NoReturn:
        raise RuntimeError("this property is broken")

    @property
    def broken(self) -> NoReturn:
        raise RuntimeError("this property is broken")

    # --- failures ---------------------------------------------------------------------------------

    def fail(self, kind: str) -> NoReturn:
        raise make_error(kind)

    async def async_fail(self, kind: str) -> NoReturn:
        raise make_error(kind)

    def unpicklable(self) -> Any:
        return {"model": [1, {"lock": threading.Lock()}]}

    async def async_unpicklable(self) -> Any:
        return {"model": [1, {"lock": threading.Lock()}]}

    # --- deaths -----------------------------------------------------------------------------------

    def print_lines(self, count: int) -> None:
        for index in range(count):
            print(f"line {index}")

    def die(self, how: str) -> NoReturn:
        """End this process: 'SIGKILL', 'SIGSEGV' or 'exit 3'."""
        if how == "SIGKILL":
            os.kill(os.getpid(), 9)
        elif how == "SIGSEGV":
            ctypes.string_at(0)
        os._exit(3)

    # --- data -------------------------------------------------------------------------------------

    def make(self, num_bytes: int) -> Any:
        """Return an array of ``num_bytes`` bytes of value 7."""
        import numpy

        return numpy.full(num_bytes, 7, dtype=numpy.uint8)

    def total(self, *arrays: Any) -> int:
        return sum(int(each.sum()) for each in arrays)

    def fill(self, array: Any, value: float) -> Any:
        array[...] = value
        return array

    def destroy(self) -> None:
        """Create the file of announce_destroy."""
        if self.destroyed:
            Path(self.destroyed).touch()

    def announce_destroy(self, path: str) -> None:
        """Set the file that destroy creates."""
        self.destroyed = path


class NeverDestroyed:
    """An engine whose async destroy never ends."""

    async def destroy(self) -> None:
        """Wait until the event loop ends."""
        await asyncio.Event().wait()


class Failing:
    """An engine whose constructor raises."""

    def __init__(self, kind: str = "ValueError") -> None:
        raise make_error(kind)


class Unreadable:
    """An engine whose __getattr__ raises."""

    def __getattr__(self, name: str) -> Any:
        if name == "model_parallel_group":
            raise AttributeError(name)
        raise RuntimeError("no attribute for you")

    def known(self) -> int:
        return 1


class Slow:
    """An engine whose constructor waits for a file."""

    def __init__(self, started: str, release: str) -> None:
        Path(started).touch()
        wait_for_file(release)

    def ready(self) -> bool:
        return True


class WithLockError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


class TwoArgumentsError(Exception):
    """An exception that pickles and does not unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class SilentError(Exception):
    """An exception whose __str__ raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def make_error(kind: str) -> BaseException:
    """Make an exception by name."""
    if kind == "WithLockError":
        return WithLockError()
    if kind == "TwoArgumentsError":
        return TwoArgumentsError("one", "two")
    if kind == "SilentError":
        return SilentError()
    if kind == "PlatformError with a lock":
        from helmsman.api.errors import PlatformError

        error = PlatformError("no such device")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        return error
    return {
        "ValueError": ValueError("a bad value"),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "SystemExit": SystemExit(7),
    }[kind]


class Family:
    """An engine that starts processes of every kind; each writes its pid to a file and waits."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.children: list[Any] = []

    def start(self) -> dict[str, int]:
        """Start a process of each kind; return their pids by kind."""
        self._subprocess("subprocess")
        self._subprocess("new_session", start_new_session=True)
        self._spawned()
        self._forked("fork")
        self._forked("fork_setsid", os.setsid)
        self._daemonized()
        self._hidden()
        kinds = [
            "subprocess",
            "grandchild",
            "new_session",
            "spawn",
            "fork",
            "fork_setsid",
            "daemon",
            "hidden",
        ]
        pids = {"worker": os.getpid()}
        for kind in kinds:
            path = f"{self.folder}/{kind}"
            wait_for_file(path)
            pids[kind] = int(Path(path).read_text())
        return pids

    def share_memory(self) -> str:
        """Create a segment of shared memory that is never unlinked; return its name."""
        from multiprocessing import shared_memory

        self.memory = shared_memory.SharedMemory(create=True, size=4096)
        return self.memory.name

    def _hidden(self) -> None:
        """Start a daemon in its own session, without environment and inherited descriptors."""
        script = (
            f"import os, sys; sys.path[:] = {sys.path!r}; os.fork() and os._exit(0); os.setsid(); "
            "os.fork() and os._exit(0); "
            f"from tests.contract.engines import stay; stay({self.folder!r}, 'hidden')"
        )
        subprocess.run(
            [sys.executable, "-I", "-c", script],
            env={},
            start_new_session=True,
            close_fds=True,
            check=True,
        )

    def _subprocess(self, kind: str, **options: Any) -> None:
        script = f"from tests.contract.engines import stay; stay({self.folder!r}, {kind!r})"
        if kind == "subprocess":  # It starts a child.
            script = (
                "import subprocess, sys; "
                "subprocess.Popen([sys.executable, '-c', \"from tests.contract.engines import "
                f"stay; stay({self.folder!r}, "
                f"'grandchild')\"]); {script}"
            )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.children.append(
            subprocess.Popen([sys.executable, "-c", script], env=environment, **options)
        )

    def _spawned(self) -> None:
        import multiprocessing

        process = multiprocessing.get_context("spawn").Process(
            target=stay, args=(self.folder, "spawn"), daemon=True
        )
        process.start()
        self.children.append(process)

    def _forked(self, kind: str, before: Callable[[], None] = lambda: None) -> None:
        if os.fork() == 0:
            before()
            stay(self.folder, kind)

    def _daemonized(self) -> None:
        """Fork twice, as daemons do, so that the parent ends at once."""
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                stay(self.folder, "daemon")
            os._exit(0)
        os.waitpid(child, 0)


class Forking:
    """An engine that forks its worker; the child leaves the method by a return or an error."""

    def fork(self, raises: bool) -> int:
        """Fork; return the child's pid, or 0 in the child."""
        child = os.fork()
        if child == 0 and raises:
            raise ValueError("in the child")
        return child

    async def afork(self, raises: bool) -> int:
        return self.fork(raises)

    def note(self, path: str, number: int) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{number}\n".encode())
        os.close(fd)
        return number


class Driving:
    """An engine that is the driver of another run, which has a Family."""

    def start(self, folder: str) -> dict[str, int]:
        """Start the other run; return the pids of its family by kind."""
        from helmsman import Job, make_scheduler

        self.inner = make_scheduler("local", log_dir=f"{folder}/logs", preload=())
        self.inner.create_workers(Job(role="inner"))
        asyncio.run(self.inner.create_engine("inner/0", Family, None, folder))
        pids: dict[str, int] = self.inner.call_engine("inner/0", "start", rpc_timeout=60)
        return pids

    def pid(self) -> int:
        return os.getpid()


def stay(folder: str, kind: str) -> NoReturn:
    """Write the pid of this process and wait for ever; ignore SIGTERM, SIGINT and SIGHUP."""
    import signal

    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    except ValueError:
        pass  # forked from a thread that is not the main thread
    path = Path(folder, kind)
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    while True:
        time.sleep(3600)


class Ranked:
    """A rank of a model-parallel group of gloo ranks."""

    def __init__(self) -> None:
        self._group: Any = None
        self.num_calls = 0

    def join(self, rank: int, world_size: int, port: str) -> None:
        """Create the process group; block until all ranks do."""
        import datetime

        import torch.distributed as dist

        timeout = datetime.timedelta(seconds=30)
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", timeout, world_size=world_size, rank=rank
        )
        self._group = dist.group.WORLD

    @property
    def model_parallel_group(self) -> Any:
        """The group of all ranks, after join."""
        return self._group

    def receive(self, *args: Any, **kwargs: Any) -> Any:
        """Count the call and return its arguments."""
        self.num_calls += 1
        return args, kwargs

    def apply(self, function: Callable[[int], Any]) -> Any:
        import torch.distributed as dist

        return function(dist.get_rank())

    def count(self) -> int:
        return self.num_calls

    def destroy(self) -> None:
        if self._group is not None:
            import torch.distributed as dist

            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


class Unloadable:
    """A value that cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


class OneWay:
    """A value that cannot be pickled again after it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return threading.Lock, ()


class Printer:
    def say(self, text: str, end: str = "\n") -> None:
        print(text, end=end, flush=True)


def _refuse() -> NoReturn:
    raise ValueError("refused to load")
