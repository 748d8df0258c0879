"""Engines of the contract tests. They import nothing heavy at the top, so workers start fast."""

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
"""Some minutes of looks at a byte in memory, so that a failed test leaves no process that computes
for ever.
"""


def hold_interpreter(started: str) -> None:
    """Write the file ``started``, then hold the interpreter's lock in C code until
    release_interpreter changes the file.

    Neither the iterator nor what it calls is Python code, so the lock is never offered to another
    thread.
    """
    Path(started).write_bytes(b"0")
    with open(started, "rb") as file, mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ) as page:
        looks = iter(functools.partial(operator.getitem, page, 0), ord("1"))
        collections.deque(itertools.islice(looks, _MOST_LOOKS), maxlen=0)


def release_interpreter(started: str) -> None:
    """End hold_interpreter, from another process."""
    with open(started, "r+b") as file:
        file.write(b"1")


_held: list[bytearray] = []


def hold_memory(num_bytes: int) -> None:
    """Keep that many resident bytes until the process ends."""
    _held.append(bytearray(b"1") * num_bytes)


class Counter(CountingEngine):
    """Counts the calls that ran, and does much besides."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.limit = start
        self.destroyed = ""

    def note_number(self, index: int, _: Any) -> None:
        """Remember that this call came."""
        self.log.append(str(index))

    def numbers(self) -> list[int]:
        """The calls that came, in their order."""
        return [int(index) for index in self.log]

    def describe(self, value: Any) -> str:
        """The type of a value, as it arrived."""
        return f"{type(value).__module__}.{type(value).__qualname__}"

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the worker."""
        return function(*args)

    async def park(self) -> None:
        """Wait for unpark without using the processor."""
        self.parked = getattr(self, "parked", None) or asyncio.Event()
        await self.parked.wait()

    async def unpark(self) -> None:
        """End all calls of park."""
        self.parked.set()

    def hold_interpreter(self, started: str, release: str) -> None:
        """As wait, with the interpreter's lock held; ``release_interpreter(started)`` ends it."""
        hold_interpreter(started)

    async def async_hold_interpreter(self, started: str, release: str) -> None:
        """As hold_interpreter, on the event loop."""
        hold_interpreter(started)

    def sleep_with_interpreter(self, seconds: float) -> None:
        """Sleep in C code with the interpreter's lock held."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    async def block_loop(self, started: str, release: str) -> None:
        """An async method that wrongly blocks its event loop."""
        Path(started).touch()
        wait_for_file(release)

    def refuse_threads(self) -> None:
        """Leave this process less address space than the stack of a new Python thread takes."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), most))
        threading.stack_size(4 << 30)

    def allow_threads(self) -> None:
        """Take refuse_threads back."""
        threading.stack_size(0)
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def environ(self, *names: str) -> dict[str, str | None]:
        """Variables of the worker."""
        return {name: os.environ.get(name) for name in names}

    def _secret(self) -> None:
        """Not callable from outside."""

    @functools.cached_property
    def broken_once(self) -> NoReturn:
        """A cached property that raises."""
        raise RuntimeError("this property is broken")

    @property
    def broken(self) -> NoReturn:
        """A property that raises."""
        raise RuntimeError("this property is broken")

    # --- failures ---------------------------------------------------------------------------------

    def fail(self, kind: str) -> NoReturn:
        """Raise one of the awkward exceptions below, or a built-in one by name."""
        raise make_error(kind)

    async def async_fail(self, kind: str) -> NoReturn:
        """As fail, on the event loop."""
        raise make_error(kind)

    def exit(self) -> NoReturn:
        """sys.exit, which is no death."""
        sys.exit(7)

    def unpicklable(self) -> Any:
        """A result with a lock deep inside."""
        return {"model": [1, {"lock": threading.Lock()}]}

    async def async_unpicklable(self) -> Any:
        """As unpicklable."""
        return {"model": [1, {"lock": threading.Lock()}]}

    # --- deaths -----------------------------------------------------------------------------------

    def print_lines(self, count: int) -> None:
        """Write to the worker's log."""
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
        """An array of that many bytes, each 7."""
        import numpy

        return numpy.full(num_bytes, 7, dtype=numpy.uint8)

    def total(self, *arrays: Any) -> int:
        """The sum over arrays or tensors."""
        return sum(int(each.sum()) for each in arrays)

    def fill(self, array: Any, value: float) -> Any:
        """Write to an argument, and return it."""
        array[...] = value
        return array

    def destroy(self) -> None:
        """Tell that it was called, where a test asked for that."""
        if self.destroyed:
            Path(self.destroyed).touch()

    def announce_destroy(self, path: str) -> None:
        """Have destroy make this file."""
        self.destroyed = path


class NeverDestroyed:
    """An engine whose async destroy never ends."""

    async def destroy(self) -> None:
        """Wait for ever, until the event loop ends."""
        await asyncio.Event().wait()


class Failing:
    """An engine whose constructor raises."""

    def __init__(self, kind: str = "ValueError") -> None:
        raise make_error(kind)


class Strange:
    """An engine whose attributes are code of its own."""

    def __getattr__(self, name: str) -> Any:
        if name == "model_parallel_group":
            raise AttributeError(name)
        raise RuntimeError("no attribute for you")

    def known(self) -> int:
        """A method that is there."""
        return 1


class Slow:
    """An engine whose constructor blocks until a file is made."""

    def __init__(self, started: str, release: str) -> None:
        Path(started).touch()
        wait_for_file(release)

    def ready(self) -> bool:
        """Say so."""
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
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def make_error(kind: str) -> BaseException:
    """An exception by name."""
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
    """An engine that starts processes of every kind, each of which writes its pid to a file of its
    own and waits for ever.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.children: list[Any] = []

    def start(self) -> dict[str, int]:
        """Start one of each; returns their pids by kind."""
        self._subprocess("subprocess")
        self._subprocess("new_session", start_new_session=True)
        self._spawned()
        self._forked("fork")
        self._forked("fork_setsid", os.setsid)
        self._daemonized()
        self._hidden()
        kinds = (
            "subprocess",
            "grandchild",
            "new_session",
            "spawn",
            "fork",
            "fork_setsid",
            "daemon",
            "hidden",
        )
        pids = {"worker": os.getpid()}
        for kind in kinds:
            path = f"{self.folder}/{kind}"
            wait_for_file(path)
            pids[kind] = int(Path(path).read_text())
        return pids

    def share_memory(self) -> str:
        """Create a segment of shared memory that is never unlinked; returns its name."""
        from multiprocessing import shared_memory

        self.memory = shared_memory.SharedMemory(create=True, size=4096)
        return self.memory.name

    def _hidden(self) -> None:
        """A daemon of a program of its own, in its own session, with an empty environment and
        without inherited descriptors.
        """
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
        if kind == "subprocess":  # and it has a child of its own
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
        """Forked twice, as servers do that go to the background: its parent ends at once."""
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                stay(self.folder, "daemon")
            os._exit(0)
        os.waitpid(child, 0)


class Forking:
    """Forks its worker in a method, and lets the child leave the method as the parent does, or by
    an error.
    """

    def fork(self, raises: bool) -> int:
        """Returns the child's pid, or 0 in the child."""
        child = os.fork()
        if child == 0 and raises:
            raise ValueError("in the child")
        return child

    async def afork(self, raises: bool) -> int:
        """Fork it on the loop's thread."""
        return self.fork(raises)

    def note(self, path: str, number: int) -> int:
        """Append a line to a file."""
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{number}\n".encode())
        os.close(fd)
        return number


class Driving:
    """An engine that is the driver of a run of its own, with a Family."""

    def start(self, folder: str) -> dict[str, int]:
        """Start it; returns the pids of the inner worker's family by kind."""
        from helmsman import Job, make_scheduler

        self.inner = make_scheduler("local", log_dir=f"{folder}/logs", preload=())
        self.inner.create_workers(Job(role="inner"))
        asyncio.run(self.inner.create_engine("inner/0", Family, None, folder))
        pids: dict[str, int] = self.inner.call_engine("inner/0", "start", rpc_timeout=60)
        return pids

    def pid(self) -> int:
        """This worker's pid."""
        return os.getpid()


def stay(folder: str, kind: str) -> NoReturn:
    """Write this process's pid and wait for ever, deaf to the polite signals."""
    import signal

    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    except ValueError:
        pass  # a fork of a thread that is not the main one
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
        """Make the process group; blocks until all ranks do."""
        import datetime

        import torch.distributed as dist

        timeout = datetime.timedelta(seconds=30)
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", timeout, world_size=world_size, rank=rank
        )
        self._group = dist.group.WORLD

    @property
    def model_parallel_group(self) -> Any:
        """All ranks, once they have joined."""
        return self._group

    def receive(self, *args: Any, **kwargs: Any) -> Any:
        """What this rank was given."""
        self.num_calls += 1
        return args, kwargs

    def apply(self, function: Callable[[int], Any]) -> Any:
        """The function of this rank."""
        import torch.distributed as dist

        return function(dist.get_rank())

    def count(self) -> int:
        """How often receive ran."""
        return self.num_calls

    def destroy(self) -> None:
        """Leave the group."""
        if self._group is not None:
            import torch.distributed as dist

            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


class Unloadable:
    """A value that unpickles nowhere."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


class OneWay:
    """A value that arrives as one which cannot be pickled again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return threading.Lock, ()


class Printer:
    def say(self, text: str, end: str = "\n") -> None:
        print(text, end=end, flush=True)


def _refuse() -> NoReturn:
    raise ValueError("refused to load")
