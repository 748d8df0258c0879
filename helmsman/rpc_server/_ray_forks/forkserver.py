"""Parent of the workers of an embedded Ray: it imports Ray and torch once and forks each worker.

Importing both costs a worker two seconds of CPU time; a fork takes milliseconds. The raylet starts
a client (client.py) for each Python worker. The fork registers with the raylet by its own pid.
Requests for any other kind of worker are refused, and left to Ray.

    driver <--- control: the raylet's pid ---> fork server --- fork ---> Ray workers
    raylet --- exec ---> client of each <--- Unix socket, alive as long as the worker --->

It runs no user code, except imports of preloaded modules, and has one thread. When the driver's
connection closes, or its process ends, it ends every worker and exits; otherwise its watcher ends
it (driver_watch.py). If it crashes, its workers continue, and Ray starts new ones itself.
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

from helmsman._process.environment import preload
from helmsman._process.main_thread import OFFER_VARIABLE, run_beside
from helmsman.rpc_server._ray_forks.client import FORKED, GREETING
from helmsman.rpc_server._ray_forks.ray_patches import (
    draws_class_ids_from_system,
    follow_omp_threads,
)

_REQUEST_BYTES = 1 << 20
_REAP_AFTER_S = 0.2
"""Seconds that a worker stays in the process table after its end. Its guardian reads the exit
status there, and on kernels before 6.15 nowhere else.
"""
_MODULES = (
    "ray._private.workers.default_worker",
    "ray._private.async_compat",
    "ray._common.usage.usage_lib",
    # A worker's first reply imports it, which takes as long as the rest of its start.
    "ray._common.pydantic_compat",
    "pydantic.v1.fields",
    "ray._private.arrow_serialization",
    "helmsman.rpc_server._server.ray_server",
)
"""Modules that every worker imports."""

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
"""Name prefixes of variables that take effect when an interpreter starts or a library is loaded."""
_FOR_EACH_WORKER = {"RAY_JOB_ID", "RAY_LD_PRELOAD_ON_WORKERS", "PYTHONBREAKPOINT"}
"""Exceptions: Ray gives these to workers, and a fork works without them. A worker without a job can
serve any job.
"""


class Order(NamedTuple):
    client: int
    """Pid of the client process."""
    folder: str
    script: str
    """Ray's worker program."""
    arguments: list[str]
    """Arguments of the script."""
    environment: dict[str, str]
    runtime_environment: dict[str, str]
    """Variables of its runtime environment; their values may refer to other variables."""
    descriptors: list[int]
    """Its standard streams."""


class _RayletFirst(importlib.abc.MetaPathFinder):
    """Delays the first import of Ray until the raylet runs, and patches Ray for forks.

    Ray reads its configuration from the environment when its library is loaded. It must contain the
    raylet's pid, without which a worker would outlive the raylet, and a job, without which it
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
            waiting = select.poll()
            for watched in (self._control.fileno(), self._driver):
                waiting.register(watched, select.POLLIN)
            ready = {number for number, _ in waiting.poll()}
            message = b""
            if self._control.fileno() in ready:
                with self._control.makefile("rb") as messages:
                    message = messages.readline()
            if not message:
                sys.exit(0)  # there is no raylet, and possibly no driver any more
            key, environment = json.loads(message)
            self.key = key.encode()
            os.environ.clear()
            os.environ.update(environment)
        if fullname == "ray.actor":
            return draws_class_ids_from_system(
                importlib.machinery.PathFinder.find_spec(fullname, path, target)
            )
        return None


class _RayForkServer:
    """Forks workers on requests of clients.

    Args:
        listener: Socket to which clients connect.
        control: Connection that ends with the driver, unless a child that the driver forked holds
            the other end.
        driver: The driver's pidfd, which reports its end in any case.
        key: Key of the requests.
        imported_with: Environment under which modules were imported.
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
        """Connection to each client, by the pid of its living worker."""
        self._ended: list[tuple[float, int]] = []
        """Ended workers: when to reap each, and its pid."""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._watch(listener, self._accept)
        self._watch(control, self._stop)
        self._watch(driver, self._stop)

    def run(self) -> Order | None:
        """Serve until the driver ends; also returns in every fork, with the worker to become."""
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
        with contextlib.suppress(OSError):  # the client has exited
            if user == os.getuid() and connection.send(GREETING):
                self._watch(connection, functools.partial(self._answer, connection, client))
                return
        connection.close()

    def _answer(self, connection: socket.socket, client: int) -> Order | None:
        """Fork the requested worker; closing the connection informs the client of a failure."""
        descriptors: list[int] = []
        order, pid = None, -1
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
            key, _, request = message.partition(b"\0")
            if len(descriptors) == 3 and hmac.compare_digest(key, self._key):
                order = read_order(request, client, descriptors, self._imported_with)
            if order is not None:
                gc.freeze()  # keeps existing objects shared with the forks
                pid = os.fork()
        except (OSError, ValueError) as error:
            print(f"ray forkserver: no worker was forked: {error}", file=sys.stderr, flush=True)
        if pid == 0:
            connection.send(FORKED)  # sent by the worker itself, which then certainly exists
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
        """End a worker whose client the raylet has killed."""
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
    """Parse a request.

    Args:
        request: Fields separated by zero bytes.
        client: Pid of the client.
        descriptors: The worker's standard streams.
        imported_with: Environment under which the modules were imported.

    Returns:
        The order; None if it is not for a plain Python worker, or if its environment differs from
        ``imported_with`` in variables that take effect at the start.
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
    """Return the variables of a runtime environment that has nothing else; None otherwise."""
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
    """Run Ray's compiled worker program in this process, a fork in which nothing else runs.

    With OFFER_VARIABLE its main thread remains free for engine calls.

    Args:
        order: The worker.
        program: The compiled program.
        driver_folders: Folders that only the fork server has in ``sys.path``.
    """
    from ray._private import utils

    os.setpgid(0, 0)  # the raylet does this for workers that it starts, and ends them by it
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
        # They were appended, and Ray may have put one of them in front since.
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]
    sys.argv[:] = [order.script, *order.arguments]
    if (numbers := sys.modules.get("numpy.random")) is not None:
        # Python's own generator reseeds itself after a fork; torch's starts from the same number in
        # every process.
        numbers.seed()
    main = ModuleType("__main__")
    main.__file__ = order.script
    sys.modules["__main__"] = main
    if os.environ.pop(OFFER_VARIABLE, None) is None:
        exec(program, main.__dict__)
    else:
        # Only the main thread can set it; run_beside's handler ends the process, as Ray's does.
        utils.set_sigterm_handler = lambda _: None
        run_beside(lambda: exec(program, main.__dict__))


def _take_after(client: int) -> None:
    """Adopt the client's limits, signal mask, SIGHUP disposition and OOM score."""
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            kind = getattr(resource, name)
            with contextlib.suppress(OSError, ValueError):  # limits that this user may not raise
                resource.setrlimit(kind, resource.prlimit(client, kind))
    status = Path(f"/proc/{client}/status").read_text()
    mask = int(status.partition("SigBlk:")[2].split()[0], 16)
    is_ignored = int(status.partition("SigIgn:")[2].split()[0], 16) >> (signal.SIGHUP - 1) & 1
    # SIGHUP is ignored under nohup.
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
        driver_folders: Folders in this process's ``sys.path`` that a worker's does not have.
        argv: The arguments.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each worker takes two descriptors. A fork gets the limits of Ray's workers.
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
        preload(["numpy.random"])  # numpy imports it lazily, for example for seeding
    sys.meta_path.remove(raylet)
    follow_omp_threads()
    with open(script, "rb") as file:
        program = compile(file.read(), script, "exec")
    order = _RayForkServer(listener, control, driver, raylet.key, dict(os.environ)).run()
    if order is None:
        # Finalizing the interpreter with all its modules takes long, and the driver waits for it.
        os._exit(0)
    become_worker(order, program, driver_folders)
