"""The parent of the workers of an embedded Ray: it has imported Ray and torch once, and forks each
worker in milliseconds.

Importing both costs a worker two seconds of CPU. The raylet starts a client (client.py) for each
Python worker. The fork registers with the raylet by its own pid. Requests for other than plain
workers are refused, and left to Ray.

    driver <--- control: the raylet's pid ---> fork server --- fork ---> Ray workers
    raylet --- exec ---> client of each <--- Unix socket, alive as long as the worker --->

It runs no user code, apart from what the modules that it preloads do at their import, and has one
thread. When the driver's connection or process is gone, it ends every worker and exits, or its
watcher ends it (driver_watch.py); when it dies itself, its workers go on, and Ray starts new ones.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hmac
import importlib.abc
import importlib.machinery
import json
import os
import resource
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from helmsman.rpc_server._process.environment import preload
from helmsman.rpc_server._ray_forks.client import FORKED, GREETING
from helmsman.rpc_server._ray_forks.ray_patches import follow_omp_threads

_REQUEST_BYTES = 1 << 20
_REAP_AFTER_S = 0.2
"""How long a worker stays in the process table after its end. Its guardian can read there how it
ended, and on kernels before 6.15 nowhere else."""
_MODULES = (
    "ray._private.workers.default_worker",
    "ray._private.async_compat",
    "ray._common.usage.usage_lib",
    # a worker's first answer imports it, which takes as long as all the rest of its start
    "ray._common.pydantic_compat",
    "pydantic.v1.fields",
    "ray._private.arrow_serialization",
    "helmsman.rpc_server._server.ray_server",
)
"""What every worker imports."""

_READ_AT_START = (
    "RAY_",
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH_",
)
"""Beginnings of the names of variables that act when an interpreter starts, or a library is
loaded.
"""
_FOR_EACH_WORKER = {"RAY_JOB_ID", "RAY_LD_PRELOAD_ON_WORKERS", "PYTHONBREAKPOINT"}
"""Those of them that Ray gives to workers, and that a fork can do without: a worker of no job in
particular may serve any.
"""


class Order(NamedTuple):
    client: int
    """Pid of the process that it has started instead."""
    folder: str
    script: str
    """Ray's program for workers."""
    arguments: list[str]
    """For the script."""
    environment: dict[str, str]
    runtime_environment: dict[str, str]
    """Variables of its runtime environment, in which others may be named."""
    descriptors: list[int]
    """To become its standard streams."""


class _RayletFirst(importlib.abc.MetaPathFinder):
    """Lets the import of Ray, by whatever module, wait until the raylet runs.

    Ray reads its configuration from the environment when its library is loaded. A worker's must
    have the raylet's pid, without which it would outlive the raylet, and a job, without which it
    aborts.
    """

    def __init__(self, control: socket.socket, driver: int) -> None:
        self._control = control
        self._driver = driver
        self.key = b""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "ray" and not self.key:
            watched: list[Any] = [self._control, self._driver]
            ready, _, _ = select.select(watched, [], [])
            message = b""
            if self._control in ready:
                with self._control.makefile("rb") as messages:
                    message = messages.readline()
            if not message:
                sys.exit(0)  # there is no raylet, and maybe no driver any more
            key, environment = json.loads(message)
            self.key = key.encode()
            os.environ.clear()
            os.environ.update(environment)
        return None


class _ForkServer:
    """The control connection ends with the driver, unless a child that the driver forked holds the
    other end; the driver's pidfd tells in any case. ``imported_with`` is the environment under
    which modules were imported.
    """

    def __init__(
        self,
        listener: socket.socket,
        control: socket.socket,
        driver: int,
        key: bytes,
        imported_with: dict[str, str],
    ) -> None:
        self._listener = listener
        self._key = key
        self._imported_with = imported_with
        self._running = True
        self._clients: dict[int, socket.socket] = {}
        """Of the workers that live, by the worker's pid."""
        self._ended: list[tuple[float, int]] = []
        """When to take the workers that have ended from the process table, and their pids."""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._watch(listener, self._accept)
        self._watch(control, self._stop)
        self._watch(driver, self._stop)

    def run(self) -> Order | None:
        """Serve until the driver is gone. Returns in every fork, too, with what it has to
        become.
        """
        while self._running:
            for key, _ in self._selector.select(_REAP_AFTER_S if self._ended else None):
                order: Order | None = key.data()
                if order is not None:
                    return order
            self._reap()
        for pid in self._clients:
            os.kill(pid, signal.SIGKILL)
        return None

    def _watch(self, source: Any, callback: Callable[[], Order | None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _forget(self, connection: socket.socket) -> None:
        if connection.fileno() >= 0:
            self._selector.unregister(connection)
            connection.close()

    def _stop(self) -> None:
        self._running = False

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        client, user, _ = struct.unpack("3i", peer)
        with contextlib.suppress(OSError):  # it has given up
            if user == os.getuid() and connection.send(GREETING):
                self._watch(connection, functools.partial(self._answer, connection, client))
                return
        connection.close()

    def _answer(self, connection: socket.socket, client: int) -> Order | None:
        """Fork the worker that is asked for; where that cannot be, the client is told by the end of
        the connection.
        """
        descriptors: list[int] = []
        order, pid = None, -1
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
            key, _, request = message.partition(b"\0")
            if len(descriptors) == 3 and hmac.compare_digest(key, self._key):
                order = read_order(request, client, descriptors, self._imported_with)
            if order is not None:
                gc.freeze()  # what is there now stays shared with the forks
                pid = os.fork()
        except (OSError, ValueError) as error:
            print(f"ray forkserver: no worker was forked: {error}", file=sys.stderr, flush=True)
        if pid == 0:
            connection.send(FORKED)  # by the worker itself: when it is told, there is one
            self._leave()
            return order
        for fd in descriptors:
            os.close(fd)
        if pid < 0:
            self._forget(connection)
            return None
        self._clients[pid] = connection
        self._selector.modify(
            connection, selectors.EVENT_READ, functools.partial(self._lose_client, pid)
        )
        pidfd = os.pidfd_open(pid)
        self._watch(pidfd, functools.partial(self._note_end, pid, pidfd))
        return None

    def _leave(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()

    def _lose_client(self, pid: int) -> None:
        """The raylet has killed what it takes for the worker."""
        connection = self._clients.pop(pid, None)
        if connection is not None:
            self._forget(connection)
            os.kill(pid, signal.SIGKILL)

    def _note_end(self, pid: int, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._ended.append((time.monotonic() + _REAP_AFTER_S, pid))
        connection = self._clients.pop(pid, None)
        if connection is not None:
            self._forget(connection)

    def _reap(self) -> None:
        now = time.monotonic()
        while self._ended and self._ended[0][0] <= now:
            os.waitpid(self._ended.pop(0)[1], 0)


def read_order(
    request: bytes, client: int, descriptors: list[int], imported_with: Mapping[str, str]
) -> Order | None:
    """Understand a request; None when it is for anything but a plain Python worker, or for one
    whose environment differs from that under which the modules were imported.
    """
    number, folder, *words = map(os.fsdecode, request.split(b"\0"))
    setup, script, *arguments = words[: int(number)]
    environment = dict(word.split("=", 1) for word in words[int(number) :])
    options = {
        name: value for name, equals, value in (each.partition("=") for each in arguments) if equals
    }
    runtime = _plain_variables(options.pop("--serialized-runtime-env-context", ""))
    is_plain = (
        runtime is not None
        and Path(setup).name == "setup_worker.py"
        and Path(script).name == "default_worker.py"
        and options.pop("--language", "") == "PYTHON"
        and "--worker-type" not in options
        and _at_start(environment) == _at_start(imported_with)
        and not _at_start(runtime)
    )
    if not is_plain or runtime is None:
        return None
    own = [
        each
        for each in arguments
        if not each.startswith(("--serialized-runtime-env-context=", "--language="))
    ]
    return Order(client, folder, script, own, environment, runtime, descriptors)


def _plain_variables(context: str) -> dict[str, str] | None:
    """The variables of a runtime environment that consists of variables; None for any other."""
    found = json.loads(context or "{}")
    variables = found.pop("env_vars", None) or {}
    if found.pop("py_executable", None) not in (None, "", sys.executable) or any(found.values()):
        return None
    return dict(variables)


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in _FOR_EACH_WORKER
    }


def become_worker(order: Order, program: CodeType, driver_folders: Iterable[str]) -> None:
    """Run Ray's compiled program for workers in this process, a fork in which nothing else runs.
    ``driver_folders`` are those that ``sys.path`` has for the fork server alone.
    """
    from ray._private import utils

    os.setpgid(0, 0)  # as the raylet does with those that it starts, and what it ends them by
    for number, fd in enumerate(order.descriptors):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(order.folder)
    _take_after(order.client)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order.environment)
    utils.update_envs(order.runtime_environment)
    time.tzset()
    for folder in driver_folders:
        # they were added at the end, and Ray may have put one of them in front since
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]
    sys.argv[:] = [order.script, *order.arguments]
    if (numbers := sys.modules.get("numpy.random")) is not None:
        # Python's own generator seeds itself after a fork; torch's starts from the same number in
        # every process
        numbers.seed()
    main = ModuleType("__main__")
    main.__file__ = order.script
    sys.modules["__main__"] = main
    exec(program, main.__dict__)


def _take_after(client: int) -> None:
    """Adopt what the raylet gave to its child: limits, signal mask, disposition of SIGHUP, and the
    score of the OOM killer.
    """
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            kind = getattr(resource, name)
            with contextlib.suppress(OSError, ValueError):  # one that this user may not raise
                resource.setrlimit(kind, resource.prlimit(client, kind))
    status = Path(f"/proc/{client}/status").read_text()
    mask = int(status.partition("SigBlk:")[2].split()[0], 16)
    is_ignored = int(status.partition("SigIgn:")[2].split()[0], 16) >> (signal.SIGHUP - 1) & 1
    # ignored under nohup
    signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    signal.pthread_sigmask(
        signal.SIG_SETMASK,
        [number for number in signal.valid_signals() if mask >> (number - 1) & 1],
    )
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(
            Path(f"/proc/{client}/oom_score_adj").read_text()
        )


def main(driver_folders: Sequence[str], argv: Sequence[str]) -> None:
    """Entry point: ``LISTENER_FD CONTROL_FD DRIVER_PIDFD SCRIPT MODULE,MODULE,...``.

    Args:
        driver_folders: what ``sys.path`` has besides what a worker's has.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # each worker takes two; a fork gets the limits of Ray's workers
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener, control = (socket.socket(fileno=int(fd)) for fd in argv[:2])
    for each in (listener, control):
        each.set_inheritable(False)
    driver = int(argv[2])
    os.set_inheritable(driver, False)
    script, modules = argv[3:5]
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    raylet = _RayletFirst(control, driver)
    sys.meta_path.insert(0, raylet)
    preload([*filter(None, modules.split(",")), *_MODULES])
    if "numpy" in sys.modules:
        preload(["numpy.random"])  # which it imports when first used, as it is by seeding
    sys.meta_path.remove(raylet)
    follow_omp_threads()
    with open(script, "rb") as file:
        program = compile(file.read(), script, "exec")
    order = _ForkServer(listener, control, driver, raylet.key, dict(os.environ)).run()
    if order is None:
        # to take the interpreter down with all that it has loaded takes long, and the driver waits
        os._exit(0)
    become_worker(order, program, driver_folders)
