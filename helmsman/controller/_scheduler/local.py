"""LocalScheduler: runs each worker in a process on this machine, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mmap
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from helmsman._base.event_loop import Deadline, await_all, run_in_executor
from helmsman._process.environment import absolute_search_path
from helmsman._process.guardian import (
    end_members,
    process_of,
    split_status,
    status_of_zombie,
)
from helmsman._process.oom import oom_count, oom_kills_since
from helmsman._process.pulse import find_page, observe
from helmsman._wire.auth import connect
from helmsman.api import errors
from helmsman.api.scheduler import Timeouts
from helmsman.controller._placement.allocator import ADDRESS, OneMachine
from helmsman.controller._placement.placement import Placement
from helmsman.controller._scheduler.backend import Backend, Launch, start_error
from helmsman.controller._scheduler.backend_scheduler import BackendScheduler
from helmsman.controller._scheduler.environment import as_mapping, worker_environment
from helmsman.controller._scheduler.forkserver_client import (
    ForkedWorker,
    ForkServer,
    ForkServerGoneError,
)
from helmsman.controller._scheduler.run_registry import make_log_dir
from helmsman.controller._scheduler.transport.base import Ending, describe_exit, log_size, tail_of
from helmsman.controller._scheduler.transport.channel import Channel
from helmsman.controller._scheduler.transport.client import WorkerClient
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._server.channel import abstract_address
from helmsman.rpc_server._server.forkserver import Spawn

_CONNECT_S = 30.0
_END_S = 6.0
"""Longest wait for a killed worker and its descendants to end."""

_REPORT_S = 0.8
"""Longest wait for the exit report of a process."""


class LocalScheduler(BackendScheduler):
    """Runs workers as processes on this machine.

    Accelerators, memory and custom resources are held by one worker at a time. CPUs are shared, so
    that a laptop can run a job of many ranks.

    Args:
        seed: Seed of the run; each worker derives its own from (seed, role, rank).
        log_dir: Folder for one log file per worker. When None: ``helmsman/<host>/<run id>`` in
            XDG_STATE_HOME if it is set, else ``helmsman-<user>/<run id>`` in the temporary folder.
        timeouts: Limits in seconds by class of operation; the defaults of Timeouts when None.
        num_cpus: Number of CPUs; those that this process may use when None.
        num_gpus: Number of accelerators; those that this process may use when None.
        accelerator: 'cuda', 'rocm' or 'npu'; the kind found on the machine when None.
        resources: Custom resources by name.
        preload: Modules imported before workers are forked, so that no worker imports them again.
            Importing torch costs a worker more than a second otherwise.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        log_dir: str | Path | None = None,
        timeouts: Timeouts | None = None,
        num_cpus: float | None = None,
        num_gpus: int | None = None,
        accelerator: str | None = None,
        resources: Mapping[str, float] | None = None,
        preload: Sequence[str] = ("torch",),
    ) -> None:
        machine = OneMachine(
            num_cpus=num_cpus, num_gpus=num_gpus, accelerator=accelerator, resources=resources
        )
        super().__init__(
            LocalBackend(machine, preload), seed=seed, log_dir=log_dir, timeouts=timeouts
        )


class LocalBackend(Backend):
    """Starts worker processes through a fork server on this machine."""

    same_machine = True

    def __init__(self, machine: OneMachine, preload: Sequence[str]) -> None:
        self.allocator = machine
        self.store = SegmentStore()
        self._devices = machine.devices
        self._preload = tuple(preload)
        self._key = secrets.token_bytes(32)
        self._server: ForkServer | None = None
        self._starting_server = asyncio.Lock()

    async def launch(self, start: Launch) -> list[WorkerClient]:
        server = await self._ensure_server()
        return await await_all(
            self._start_worker(start, *pair, server) for pair in start.places.items()
        )

    async def _ensure_server(self) -> ForkServer:
        async with self._starting_server:
            if self._server is not None and self._server.has_ended:
                await self.close()  # it was killed, with its workers; start another
                self._server = None
            if self._server is None:
                make_log_dir(self.run.log_dir, self.run.id)
                self._server = await ForkServer.start(
                    self.run.id, self.run.log_dir / "forkserver.log", self._preload
                )
            return self._server

    async def _start_worker(
        self, start: Launch, rank: int, place: Placement, server: ForkServer
    ) -> WorkerClient:
        identity = self.run.identity(start.job, rank, ADDRESS)
        devices = self._devices.environment(place.devices)
        path = abstract_address()
        environment = worker_environment(
            os.environ, start.job.spec(rank), devices, same_machine=True
        )
        log_start = log_size(identity.log_path)
        order = Spawn(identity, path, self._key, as_mapping(environment), absolute_search_path())
        try:
            async with asyncio.timeout(start.deadline.remaining_s):
                worker = await server.spawn(order)
                process = LocalProcess(server, worker, identity.log_path, log_start)
                start.undo.push_async_callback(process.kill)
                channel = await open_channel(identity.worker_id, path, self._key, process)
        except (OSError, errors.ProtocolError, ForkServerGoneError, TimeoutError) as error:
            reason = (
                str(error)
                or f"it did not answer within {start.deadline.limit_s:g} s (Timeouts.start_s)"
            )
            raise start_error(
                identity.worker_id, ADDRESS, reason, identity.log_path, log_start
            ) from error
        client = WorkerClient(
            identity.worker_id, place, worker.pid, identity.log_path, channel, self.run.timeouts
        )
        client.environment = devices
        return client

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(self.run.timeouts.shutdown_s)


class LocalProcess:
    """A worker's process and its end; its log begins at byte ``log_start`` of the file."""

    def __init__(
        self, server: ForkServer, worker: ForkedWorker, log_path: str, log_start: int
    ) -> None:
        self._server = server
        self._worker = worker
        self._log_path = log_path
        self._log_start = log_start
        self._oom = oom_count(worker.pid)
        self._page: mmap.mmap | None = None
        self._watch: asyncio.Future[None] | None = None

    def on_end(self, react: Callable[[], None]) -> None:
        """Call ``react`` when the process has ended; requires that it already serves."""

        async def watch() -> None:
            await self._worker.wait_family()
            self._page = None  # it has a descriptor
            react()

        self._page = find_page(self._worker.pid, self._worker.tag)
        self._watch = asyncio.ensure_future(watch())

    async def kill(self) -> None:
        """End the process and its descendants.

        Raises:
            ShutdownIncompleteError: Some of them are still running; it lists them.
        """
        deadline = Deadline(_END_S)
        pid, tag = self._worker.pid, self._worker.tag
        self._server.kill(self._worker)
        try:
            survivors = set(
                await asyncio.wait_for(self._worker.wait_family(), deadline.remaining_s)
            )
        except TimeoutError:
            survivors = {pid}
        else:
            # The forkserver has checked once; a process that frees much memory takes longer.
            if survivors:
                survivors = await run_in_executor(end_members, survivors, pid, tag)
        if survivors:
            worker_id = tag.partition("/")[2]
            raise errors.ShutdownIncompleteError(
                operation=f"ending {worker_id}",
                remaining=[f"pid {each} of {worker_id}" for each in sorted(survivors)],
                elapsed_s=deadline.elapsed_s,
                command="kill -9 " + " ".join(map(str, sorted(survivors))),
            )

    async def wait_ended(self, limit_s: float) -> None:
        """Wait at most ``limit_s`` seconds for the process to end by itself."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._worker.wait_family(), limit_s)

    async def ending(self, lost_because: str) -> Ending:
        """Return how the process ended.

        A process that is still running after its channel was lost cannot be reached, so it is
        killed.
        """
        try:
            status: int | None = await asyncio.wait_for(self._worker.wait_exit(), _REPORT_S)
        except TimeoutError:
            status = status_of_zombie(self._worker.pid)
            if status is None and process_of(self._worker.pid) is not None:
                self._server.kill(self._worker)
                cause = f"was ended by this scheduler: {lost_because or 'its connection was lost'}"
                return Ending(cause, None, signal.SIGKILL, self._log_tail())
        code, number = split_status(status) if status is not None else (None, None)
        return Ending(
            describe_exit(code, number, oom_kills_since(self._oom)), code, number, self._log_tail()
        )

    async def observe(self, limit_s: float) -> bytes:
        if self._page is None:
            return b""
        return await run_in_executor(observe, self._page, self._worker.pid)

    def _log_tail(self) -> str:
        return tail_of(self._log_path, start=self._log_start)


async def open_channel(worker_id: str, path: str, key: bytes, process: LocalProcess) -> Channel:
    """Connect to the worker that listens at ``path``.

    Raises:
        OSError: The connection failed.
        ProtocolError: Authentication or the handshake failed.
    """
    channel = Channel(
        worker_id, functools.partial(connect, path, key, _CONNECT_S), process, shares_memory=True
    )
    await channel.open()
    process.on_end(channel.close)
    return channel
