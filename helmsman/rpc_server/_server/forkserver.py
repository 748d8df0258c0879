"""Parent of a LocalScheduler's workers: it imports torch once and forks workers in milliseconds.

It runs no user code and has one thread, so it always answers. As their parent it receives the
exit status of each worker. It also guarantees that nothing survives the driver: when its connection
to the driver closes, or the driver's process ends, it ends all workers and their descendants, and
exits. If it cannot, its watcher does so (driver_watch.py).

    driver <--- Unix socket pair ---> forkserver --- fork ---> workers
           Spawn, Kill ->
           <- Spawned, Exited, ...
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

import msgspec

from helmsman._process import guardian
from helmsman._process.child_processes import prepare_for_children
from helmsman._process.driver_watch import NO_PIDFD
from helmsman._process.environment import extend_search_path, preload, redirect_output
from helmsman._process.main_thread import interrupt_engine
from helmsman._process.pulse import Pulse
from helmsman._process.safe_files import open_log
from helmsman._process.stack_dump import offer_stacks
from helmsman._wire.messages import WorkerIdentity
from helmsman._wire.wire import FrameReader, pack_length
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.rpc_server._host.journal import write_to_stderr
from helmsman.rpc_server._host.threads import share_interpreter
from helmsman.rpc_server._server.channel import ChannelServer, listen_abstract

NOTICE_S = 25.0
"""Seconds that a worker continues after a SIGTERM. Preemption grants a process 30 s, as Kubernetes
does, or more.
"""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Spawn(msgspec.Struct, frozen=True, tag=True):
    identity: WorkerIdentity
    address: str
    """Abstract Unix socket on which the worker will listen."""
    key: bytes
    """The run's key."""
    env: dict[str, str]
    """The worker's whole environment."""
    search_path: list[str] = []
    """The driver's ``sys.path``, which may have grown since the forkserver started."""


class KillWorker(msgspec.Struct, frozen=True, tag=True):
    """End a worker's process at once; its Exited and FamilyEnded follow."""

    pid: int


class Spawned(msgspec.Struct, frozen=True, tag=True):
    address: str
    """That of its Spawn."""
    pid: int


class NotSpawned(msgspec.Struct, frozen=True, tag=True):
    """A worker's log cannot be opened, or the system refused its socket or process."""

    address: str
    """That of its Spawn."""
    reason: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A worker's process has ended; its family, the processes it started, is ended next."""

    pid: int
    status: int
    """Status that waitpid returned."""


class FamilyEnded(msgspec.Struct, frozen=True, tag=True):
    """The family of an exited worker was ended."""

    pid: int
    survivors: list[int]
    """Pids of the family that could not be ended."""


encode_message = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Spawn | KillWorker).decode
decode_event = msgspec.msgpack.Decoder(Spawned | NotSpawned | Exited | FamilyEnded).decode


class _ForkServer:
    """Forks workers, reports their ends, and ends them with the driver.

    Args:
        channel: Connection to the driver.
        driver: The driver's pidfd: a child that the driver forked may hold the driver's end of the
            channel open.
        watcher: Pid of the process that ends the run if this one cannot.
    """

    def __init__(self, channel: socket.socket, driver: int, watcher: int) -> None:
        self._channel = channel
        self._driver = driver
        self._watcher = watcher
        self._workers: dict[int, str] = {}
        self._reader = FrameReader()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminate)
        waiting = select.poll()  # the driver's descriptors may have numbers beyond select's 1024
        for watched in (self._channel.fileno(), self._wake_read, self._driver):
            if watched != NO_PIDFD:
                waiting.register(watched, select.POLLIN)
        try:
            while True:
                ready = {number for number, _ in waiting.poll()}
                if self._driver in ready:
                    return
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    self._reap()
                if self._channel.fileno() in ready:
                    data = self._channel.recv(1 << 16)
                    if not data:
                        return
                    for frame in self._reader.feed(data):
                        self._obey(decode_order(frame))
        except (ConnectionError, BrokenPipeError):
            return  # the driver has exited
        finally:
            self._end()

    def _terminate(self, *_: Any) -> None:
        self._end()
        os._exit(128 + signal.SIGTERM)

    def _obey(self, order: Spawn | KillWorker) -> None:
        if isinstance(order, KillWorker):
            if order.pid in self._workers:
                os.kill(order.pid, signal.SIGKILL)
            return
        gc.freeze()
        me = os.getpid()
        try:
            # Opened before the fork, so that a failure is reported.
            log = open_log(order.identity.log_path, order.identity.run_id)
            try:
                with listen_abstract(order.address) as listener:
                    # Listens before the fork, so that the controller can connect at once.
                    pid = os.fork()
                    if pid == 0:
                        inherited = [self._channel.fileno(), self._wake_read, self._wake_write]
                        inherited += [self._driver] if self._driver != NO_PIDFD else []
                        _become_worker(order, listener, log, inherited, me)
            finally:
                os.close(log)
        except OSError as error:
            self._tell(NotSpawned(order.address, str(error)))
            return
        self._workers[pid] = worker_tag(order.identity)
        self._tell(Spawned(order.address, pid))

    def _reap(self) -> None:
        families: dict[int, str] = {}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self._workers:  # otherwise an adopted orphan of a worker
                    families[pid] = self._workers.pop(pid)
                    self._tell(Exited(pid, status))
        for pid, tag in families.items():  # last, since each may take seconds
            self._tell(FamilyEnded(pid, sorted(guardian.end_family(pid, tag))))

    def _tell(self, event: Spawned | NotSpawned | Exited | FamilyEnded) -> None:
        message = encode_message(event)
        self._channel.sendall(pack_length(len(message)) + message)

    def _end(self) -> None:
        """End all workers and descendants; as subreaper, this process inherits their orphans."""
        guardian.kill_all(self._workers)
        for pid, tag in self._workers.items():
            guardian.end_family(pid, tag)
        me = os.getpid()
        guardian.wait_until(lambda: not self._kill_descendants(me), 5.0)

    def _kill_descendants(self, me: int) -> bool:
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        left = guardian.descendants(me, guardian.process_table()) - {self._watcher}
        guardian.kill_all(left)
        return bool(left)


def worker_tag(identity: WorkerIdentity) -> str:
    return f"{identity.run_id}/{identity.worker_id}"


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _become_worker(
    order: Spawn, listener: socket.socket, log: int, inherited: list[int], parent: int
) -> None:
    """Continue as a worker in the forked child; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, interrupt_engine)
        for fd in inherited:
            os.close(fd)
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() != parent:
            os._exit(1)  # the forkserver exited before prctl took effect
        redirect_output(log)
        write_to_stderr()
        os.environ.clear()
        os.environ.update(order.env)
        os.environ[guardian.TAG_VARIABLE] = worker_tag(order.identity)
        guardian.bear_mark(guardian.Mark(order.identity.run_id, os.getpid()))
        extend_search_path(order.search_path)
        code = serve_worker(order.identity, listener, order.key)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    # The process's outermost frame: its error must reach the log.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve_worker(identity: WorkerIdentity, listener: socket.socket, key: bytes) -> int:
    """Run a local worker until SHUTDOWN, with engine methods on this thread.

    Returns the exit code.
    """
    # Only the crashed thread: the stacks of all threads would fill the log's tail.
    faulthandler.enable(all_threads=False)
    offer_stacks()
    share_interpreter()
    host = EngineHost(
        identity, SegmentStore(), pulse=Pulse(f"{identity.run_id}/{identity.worker_id}")
    )
    host.on_shutdown = host.engine_thread.stop
    _take_notice(host)
    server = ChannelServer(
        listener, key, host, shares_memory=True, engine_thread=host.engine_thread
    )
    server.start()
    host.engine_thread.run()
    server.close()
    host.close()
    host.join()
    return 0


def _take_notice(host: EngineHost) -> None:
    """Treat SIGTERM as a preemption notice.

    The worker reports the notice in its health, so that its work can move elsewhere. It ends
    ``NOTICE_S`` seconds later, or at a second SIGTERM. Helmsman itself ends workers by SIGKILL.
    """
    code = 128 + signal.SIGTERM

    def told(*_: Any) -> None:
        if host.ends_at is not None:
            os._exit(code)
        else:
            last = threading.Timer(NOTICE_S, os._exit, (code,))
            last.daemon = True
            try:
                last.start()
            except RuntimeError:  # no thread can be started to end it later
                os._exit(code)
            host.ends_at = time.monotonic() + NOTICE_S

    signal.signal(signal.SIGTERM, told)
    prepare_for_children()


def main(watcher: int, argv: list[str]) -> None:
    """Entry point: ``FD DRIVER_PIDFD MODULE,MODULE,...``.

    Args:
        watcher: Pid of the watcher that watch_driver has returned.
        argv: The arguments.
    """
    driver = int(argv[1])
    channel = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(channel.fileno(), False)
    if driver != NO_PIDFD:
        os.set_inheritable(driver, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    preload(filter(None, argv[2].split(",")))
    _ForkServer(channel, driver, watcher).run()
