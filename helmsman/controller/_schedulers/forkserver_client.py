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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from helmsman.controller._aio.event_loop import Deadline, run_in_executor
from helmsman.controller._transport.base import tail_of
from helmsman.rpc_server._process import guardian
from helmsman.rpc_server._process.driver_watch import NO_PIDFD, pidfd_of_this_process
from helmsman.rpc_server._process.safe_files import open_log
from helmsman.rpc_server._server.forkserver import (
    Exited,
    Kill,
    NotSpawned,
    Spawn,
    Spawned,
    decode_event,
    encode_message,
    worker_tag,
)
from helmsman.rpc_server._wire.wire import FrameReader, pack_length

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); run_id, *args = sys.argv[2:]; "
    "from helmsman.rpc_server._process.driver_watch import watch_driver; "
    "watcher = watch_driver(int(args[1]), run_id, args[2]); "
    "from helmsman.rpc_server._server.forkserver import main; main(watcher, args)"
)


_MAX_THREADS = 16


class ForkServerGoneError(Exception):
    """The forkserver died, and its workers with it."""


class _Worker(NamedTuple):
    tag: str
    status: asyncio.Future[int]
    survivors: asyncio.Future[list[int]]
    """Those of its family that could not be ended."""


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
        """Orders not obeyed yet: socket path -> (future of the pid, tag)."""
        self._workers: dict[int, _Worker] = {}
        self.has_ended = False
        """Whether it has ended, and its workers with it."""
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, run_id: str, run_dir: Path, log_path: Path, preload: Sequence[str]
    ) -> ForkServer:
        """Start it; it answers once its modules are imported."""
        ours, theirs = socket.socketpair()
        undo = contextlib.ExitStack()
        undo.callback(ours.close)
        with (
            undo,
            theirs,
            pidfd_of_this_process() as driver,
            os.fdopen(open_log(log_path, run_id), "ab") as log,
        ):
            # In a session of its own: the terminal's Ctrl-C is for the script, which then ends its
            # workers in order.
            arguments = [run_id, str(theirs.fileno()), str(driver), str(run_dir), ",".join(preload)]
            # A start is a few milliseconds, once in a run
            process = subprocess.Popen(  # noqa: ASYNC220
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
            if isinstance(event, Spawned):
                self._begun(event)
            elif isinstance(event, NotSpawned):
                waiting, _ = self._spawned.pop(event.socket_path)
                if not waiting.cancelled():
                    waiting.set_exception(OSError(event.reason))
            elif isinstance(event, Exited):
                self._workers[event.pid].status.set_result(event.status)
            else:
                self._workers[event.pid].survivors.set_result(event.survivors)

    def _begun(self, event: Spawned) -> None:
        waiting, tag = self._spawned.pop(event.socket_path)
        loop = asyncio.get_running_loop()
        self._workers[event.pid] = _Worker(tag, loop.create_future(), loop.create_future())
        if waiting.cancelled():
            self.kill(event.pid)  # its caller has given up
        else:
            waiting.set_result(event.pid)

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_ended = True
        for waiting, _ in self._spawned.values():
            if not waiting.done():
                waiting.set_exception(self._error())
        for worker in self._workers.values():
            if not worker.status.done():
                worker.status.set_result(signal.SIGKILL)  # its death signal
        self._ending = asyncio.ensure_future(self._end_families())

    async def _end_families(self) -> None:
        """End what its workers had started: only this process still has the tags."""
        left = {
            pid: worker.tag for pid, worker in self._workers.items() if not worker.survivors.done()
        }
        if left:
            for pid, survivors in (await run_in_executor(_end_families, left)).items():
                self._workers[pid].survivors.set_result(survivors)

    def _error(self) -> ForkServerGoneError:
        return ForkServerGoneError(
            "the parent of all local workers has ended; its log: "
            f"{self._log_path}\n{tail_of(self._log_path)}"
        )

    async def spawn(self, order: Spawn) -> int:
        """Fork a worker and return its pid. Raises ForkServerGoneError, OSError."""
        if self.has_ended:
            raise self._error()
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._spawned[order.socket_path] = waiting, worker_tag(order.identity)
        self._send(order)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.kill(waiting.result())  # it was there at the same moment
            raise

    async def wait_exit(self, pid: int) -> int:
        """Await the end of a worker; returns its wait status."""
        return await asyncio.shield(self._workers[pid].status)

    async def wait_family(self, pid: int) -> list[int]:
        """Await the end of a worker and of its family; returns those that could not be ended."""
        return await asyncio.shield(self._workers[pid].survivors)

    def kill(self, pid: int) -> None:
        if not self._workers[pid].status.done():
            self._send(Kill(pid))

    def _send(self, order: Spawn | Kill) -> None:
        assert self._transport is not None
        message = encode_message(order)
        self._transport.write(pack_length(len(message)) + message)

    async def stop(self, limit_s: float) -> None:
        """Close the connection, upon which it ends everything, and await its end."""
        if self._transport is not None:
            # also for children that this process has forked and that hold a copy of the socket
            self._transport.write_eof()
            self._transport.close()
        deadline = Deadline(limit_s)
        while self._process.poll() is None:
            # and no thread that waits: at the end of the interpreter there is none to be had
            if deadline.passed:
                self._process.kill()
            await asyncio.sleep(0.005)
        if self._ending is not None:
            await self._ending


def _end_families(tags: Mapping[int, str]) -> dict[int, list[int]]:
    """End the families of workers, all at a time; returns who is left of each."""

    def end(pid: int) -> list[int]:
        return sorted(guardian.end_family(pid, tags[pid], limit_s=1.0))

    try:
        with ThreadPoolExecutor(min(len(tags), _MAX_THREADS)) as threads:
            return dict(zip(tags, threads.map(end, tags), strict=True))
    except RuntimeError:  # at the end of the interpreter no thread starts
        return {pid: end(pid) for pid in tags}
