"""The driver's end of the forkserver: starts it, asks it for workers, hears how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._transport.base import tail_of
from helmsman.rpc_server._process import guardian
from helmsman.rpc_server._process.driver_watch import NO_PIDFD, pidfd_of_this_process
from helmsman.rpc_server._process.safe_files import open_log
from helmsman.rpc_server._server.forkserver import Exited, Kill, NotSpawned, Spawn, decode_event, encode_message, worker_tag
from helmsman.rpc_server._wire.wire import FrameReader, pack_length

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); run_id, *args = sys.argv[2:]; "
    "from helmsman.rpc_server._process.driver_watch import watch_driver; "
    "watcher = watch_driver(int(args[1]), run_id, args[2]); "
    "from helmsman.rpc_server._server.forkserver import main; main(watcher, args)"
)


class ForkServerGoneError(Exception):
    """The forkserver died, and its workers with it."""


class ForkServer(asyncio.Protocol):
    """A running forkserver. Its methods run on the background loop.

    Args of start:
        run_dir: folder of the workers' sockets; the forkserver removes it at its end.
        log_path: where the forkserver's own output goes.
        preload: modules it imports before it forks.
    """

    def __init__(self, process: subprocess.Popen[bytes], log_path: str) -> None:
        self._process = process
        self._log_path = log_path
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._spawned: dict[str, tuple[asyncio.Future[int], str]] = {}
        """Orders not obeyed yet: socket path -> (who waits for the pid, tag)."""
        self._exited: dict[int, asyncio.Future[Exited]] = {}
        self._tags: dict[int, str] = {}
        self._gone = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, run_id: str, run_dir: Path, log_path: Path, preload: Sequence[str]) -> ForkServer:
        """Start it; it answers once its modules are imported."""
        ours, theirs = socket.socketpair()
        undo = contextlib.ExitStack()
        undo.callback(ours.close)
        with undo, theirs, pidfd_of_this_process() as driver, os.fdopen(open_log(log_path, run_id), "ab") as log:
            # In a session of its own: the terminal's Ctrl-C is for the script, which then ends its workers in order.
            arguments = [run_id, str(theirs.fileno()), str(driver), str(run_dir), ",".join(preload)]
            process = subprocess.Popen(  # noqa: ASYNC220 - a start is a few milliseconds, once in a run
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[fd for fd in (theirs.fileno(), driver) if fd != NO_PIDFD],
                env={**os.environ, guardian.TAG_VARIABLE: f"{run_id}/forkserver"},
                start_new_session=True,
            )
            undo.pop_all()
        loop = asyncio.get_running_loop()
        _, server = await loop.create_connection(lambda: cls(process, str(log_path)), sock=ours)
        return server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            event = decode_event(frame)
            if isinstance(event, Exited):
                self._settle_exit(event)
                continue
            waiting, tag = self._spawned.pop(event.socket_path)
            if isinstance(event, NotSpawned):
                if not waiting.cancelled():
                    waiting.set_exception(OSError(event.reason))
                continue
            self._tags[event.pid] = tag
            self._exited[event.pid] = asyncio.get_running_loop().create_future()
            if waiting.cancelled():
                self.kill(event.pid)  # whoever asked for it has given up
            else:
                waiting.set_result(event.pid)

    def connection_lost(self, exc: Exception | None) -> None:
        error = ForkServerGoneError(
            f"the parent of all local workers has ended; its log: {self._log_path}\n{tail_of(self._log_path)}"
        )
        for waiting, _ in self._spawned.values():
            if not waiting.done():
                waiting.set_exception(error)
        # Its workers die with it by their death signal; what they started does not, and we are the last who know their marks.
        for pid, exited in self._exited.items():
            if not exited.done():
                survivors = guardian.end_family(pid, self._tags[pid], limit_s=1.0)
                exited.set_result(Exited(pid, signal.SIGKILL, sorted(survivors)))
        if not self._gone.done():
            self._gone.set_result(None)

    def _settle_exit(self, event: Exited) -> None:
        exited = self._exited[event.pid]
        if not exited.done():
            exited.set_result(event)

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, with all its workers."""
        return self._gone.done()

    async def spawn(self, order: Spawn) -> int:
        """Fork a worker and return its pid. Raises ForkServerGoneError, OSError."""
        if self._gone.done():
            raise ForkServerGoneError(f"the parent of all local workers has ended; its log: {self._log_path}")
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._spawned[order.socket_path] = waiting, worker_tag(order.identity)
        self._send(order)
        return await waiting

    async def wait_exit(self, pid: int) -> Exited:
        """Await the end of a worker and of its family."""
        return await asyncio.shield(self._exited[pid])

    def kill(self, pid: int) -> None:
        """End a worker at once."""
        if not self._exited[pid].done():
            self._send(Kill(pid))

    def _send(self, order: Spawn | Kill) -> None:
        assert self._transport is not None
        message = encode_message(order)
        self._transport.write(pack_length(len(message)) + message)

    async def stop(self, limit_s: float) -> None:
        """Close the connection, upon which it ends everything, and await its end."""
        if self._transport is not None:
            self._transport.write_eof()  # also for children that this process has forked and that hold a copy of the socket
            self._transport.close()
        deadline = Deadline(limit_s)
        while self._process.poll() is None:  # and no thread that waits: at the end of the interpreter there is none to be had
            if deadline.passed:
                self._process.kill()
            await asyncio.sleep(0.005)
