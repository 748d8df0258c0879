"""The driver's side of the forkserver: starts it, requests workers, receives their exit events."""

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
from typing import NamedTuple, cast

from helmsman._base.event_loop import Deadline, run_in_executor
from helmsman._process import guardian
from helmsman._process.driver_watch import NO_PIDFD, pidfd_of_this_process
from helmsman._process.safe_files import open_log
from helmsman._wire.wire import FrameReader, pack_length
from helmsman.controller._scheduler.environment import short_spin
from helmsman.controller._scheduler.transport.base import tail_of
from helmsman.rpc_server._server.forkserver import (
    Exited,
    KillWorker,
    NotSpawned,
    Spawn,
    Spawned,
    decode_event,
    encode_message,
    worker_tag,
)

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); run_id, *args = sys.argv[2:]; "
    "from helmsman._process.driver_watch import watch_driver; "
    "watcher = watch_driver(int(args[1]), run_id); "
    "from helmsman.rpc_server._server.forkserver import main; main(watcher, args)"
)


_MAX_THREADS = 16


class ForkServerGoneError(Exception):
    """The forkserver has died, and its workers with it."""


class ForkedWorker(NamedTuple):
    """A worker that a forkserver has forked."""

    pid: int
    tag: str
    status: asyncio.Future[int]
    """Wait status, once it has ended."""
    survivors: asyncio.Future[list[int]]
    """Pids of the worker and its descendants that could not be ended, once it has ended."""

    async def wait_exit(self) -> int:
        """Wait until the worker has ended; returns its wait status."""
        return await asyncio.shield(self.status)

    async def wait_family(self) -> list[int]:
        """Wait until the worker and its descendants have ended; returns its ``survivors``."""
        return await asyncio.shield(self.survivors)


class ForkServer(asyncio.Protocol):
    """A running forkserver. Its methods run on the background loop."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: str) -> None:
        self._process = process
        self._log_path = log_path
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._spawned: dict[str, tuple[asyncio.Future[ForkedWorker], str]] = {}
        """Pending spawn requests: address -> (future of the worker, tag)."""
        self._workers: dict[int, ForkedWorker] = {}
        """By pid, until a worker and its descendants have ended."""
        self.has_ended = False
        """Whether the forkserver has exited, and its workers with it."""
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, run_id: str, log_path: Path, preload: Sequence[str]) -> ForkServer:
        """Start a forkserver, which accepts requests once its modules are imported.

        Args:
            run_id: Id of the run.
            log_path: File for the forkserver's own output.
            preload: Modules that it imports before it forks.
        """
        ours, theirs = socket.socketpair()
        undo = contextlib.ExitStack()
        undo.callback(ours.close)
        with (
            undo,
            theirs,
            pidfd_of_this_process() as driver,
            os.fdopen(open_log(log_path, run_id), "ab") as log,
        ):
            # In a session of its own, so that the terminal's Ctrl-C reaches only the script, which
            # then ends its workers in order.
            arguments = [run_id, str(theirs.fileno()), str(driver), ",".join(preload)]
            # A start blocks for a few milliseconds, once per run
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[fd for fd in (theirs.fileno(), driver) if fd != NO_PIDFD],
                env={
                    **short_spin(os.environ),
                    **os.environ,
                    guardian.TAG_VARIABLE: f"{run_id}/forkserver",
                },
                start_new_session=True,
            )
            undo.pop_all()
        loop = asyncio.get_running_loop()
        _, server = await loop.create_connection(lambda: cls(process, str(log_path)), sock=ours)
        return server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no instance of it

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            event = decode_event(frame)
            if isinstance(event, Spawned):
                self._begun(event)
            elif isinstance(event, NotSpawned):
                waiting, _ = self._spawned.pop(event.address)
                if not waiting.cancelled():
                    waiting.set_exception(OSError(event.reason))
            elif isinstance(event, Exited):
                self._workers[event.pid].status.set_result(event.status)
            else:
                self._workers.pop(event.pid).survivors.set_result(event.survivors)

    def _begun(self, event: Spawned) -> None:
        waiting, tag = self._spawned.pop(event.address)
        loop = asyncio.get_running_loop()
        worker = ForkedWorker(event.pid, tag, loop.create_future(), loop.create_future())
        self._workers[event.pid] = worker
        if waiting.cancelled():
            self.kill(worker)  # its caller was cancelled
        else:
            waiting.set_result(worker)

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
        """End the descendants of its workers; only this process still has their tags."""
        left = {pid: worker.tag for pid, worker in self._workers.items()}
        if left:
            for pid, survivors in (await run_in_executor(_end_families, left)).items():
                self._workers.pop(pid).survivors.set_result(survivors)

    def _error(self) -> ForkServerGoneError:
        return ForkServerGoneError(
            "the forkserver has ended, and all local workers with it; its log: "
            f"{self._log_path}\n{tail_of(self._log_path)}"
        )

    async def spawn(self, order: Spawn) -> ForkedWorker:
        """Fork a worker.

        Raises:
            ForkServerGoneError: The forkserver has died.
            OSError: The fork failed.
        """
        if self.has_ended:
            raise self._error()
        waiting: asyncio.Future[ForkedWorker] = asyncio.get_running_loop().create_future()
        self._spawned[order.address] = waiting, worker_tag(order.identity)
        self._send(order)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.kill(waiting.result())  # it was spawned just before the cancellation
            raise

    def kill(self, worker: ForkedWorker) -> None:
        if not worker.status.done():
            self._send(KillWorker(worker.pid))

    def _send(self, order: Spawn | KillWorker) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return  # connection_lost() follows; uvloop raises here, where asyncio ignores a write
        message = encode_message(order)
        self._transport.write(pack_length(len(message)) + message)

    async def stop(self, limit_s: float) -> None:
        """Close the connection, upon which the forkserver ends everything; wait for its exit."""
        if self._transport is not None:
            # close() alone is not enough: forked children may hold a copy of the socket.
            if not self._transport.is_closing():
                self._transport.write_eof()
            self._transport.close()
        deadline = Deadline(limit_s)
        while self._process.poll() is None:
            # Polls, since no thread can be started for waiting while the interpreter exits.
            if deadline.passed:
                self._process.kill()
            await asyncio.sleep(0.005)
        if self._ending is not None:
            await self._ending


def _end_families(tags: Mapping[int, str]) -> dict[int, list[int]]:
    """End the descendants of all workers in parallel; returns the remaining pids of each."""

    def end(pid: int) -> list[int]:
        return sorted(guardian.end_family(pid, tags[pid], limit_s=1.0))

    try:
        with ThreadPoolExecutor(min(len(tags), _MAX_THREADS)) as threads:
            return dict(zip(tags, threads.map(end, tags), strict=True))
    except RuntimeError:  # no thread can start while the interpreter exits
        return {pid: end(pid) for pid in tags}
