"""InlineScheduler: runs all workers in the driver's process, for debugger breakpoints in engines.

Messages pass through the codec and an EngineHost, as on other schedulers. All workers share one
environment, default process group and random state; an engine that exits the process ends the
script.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from helmsman._base.readiness import Leader
from helmsman._wire.codec import Payload
from helmsman._wire.messages import Reply
from helmsman._wire.wire import Outgoing
from helmsman.api.environment import EnvironmentVariable
from helmsman.api.errors import InvalidSpecError
from helmsman.api.platforms import current_platform
from helmsman.api.scheduler import Timeouts
from helmsman.controller._placement.allocator import OneMachine
from helmsman.controller._scheduler.backend import Backend, Launch
from helmsman.controller._scheduler.backend_scheduler import BackendScheduler
from helmsman.controller._scheduler.transport.base import (
    Awaited,
    Ending,
    Transport,
    TransportLostError,
)
from helmsman.controller._scheduler.transport.client import WorkerClient
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost

_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class InlineScheduler(BackendScheduler):
    """Runs workers as threads of this process.

    Environment variables that workers set are restored when the scheduler closes. Workers hold
    accelerators as on other schedulers, but each of them can see every accelerator.

    Args:
        seed: Unused: inline workers are not seeded, since they share the script's random state.
        log_dir: Folder for the logs of the run. When None: ``helmsman/<host>/<run id>`` in
            XDG_STATE_HOME if it is set, else ``helmsman-<user>/<run id>`` in the temporary folder.
        timeouts: Limits in seconds by class of operation; the defaults of Timeouts when None.
        num_cpus: Number of CPUs; those that this process may use when None.
        num_gpus: Number of accelerators; those that this process may use when None.
        accelerator: 'cuda', 'rocm' or 'npu'; the kind found on the machine when None.
        resources: Custom resources by name.
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
    ) -> None:
        machine = OneMachine(
            num_cpus=num_cpus, num_gpus=num_gpus, accelerator=accelerator, resources=resources
        )
        super().__init__(InlineBackend(machine), seed=seed, log_dir=log_dir, timeouts=timeouts)


class InlineBackend(Backend):
    """Starts workers as EngineHosts in the script's process."""

    shares_process = True

    def __init__(self, machine: OneMachine) -> None:
        self.allocator = machine
        self.store = SegmentStore()
        self._environment = dict(os.environ)
        self._set_by: dict[str, dict[str, str]] = {}
        """Worker -> the variables that it set, while it lives."""

    async def launch(self, start: Launch) -> list[WorkerClient]:
        clients = []
        for rank, place in start.places.items():
            identity = msgspec.structs.replace(
                self.run.identity(start.job, rank, place.node), log_path=""
            )
            host = EngineHost(identity, self.store, seeding=False)
            host.engine_thread.start(identity.worker_id)
            host.set_environment(
                [
                    EnvironmentVariable(*item, "spec.env_vars")
                    for item in start.job.spec(rank).env_vars.items()
                ]
            )
            transport = InlineTransport(
                host, functools.partial(self._set_by.pop, identity.worker_id, None)
            )
            start.undo.push_async_callback(transport.kill)
            clients.append(
                WorkerClient(
                    identity.worker_id, place, os.getpid(), "", transport, self.run.timeouts
                )
            )
        return clients

    def guard_platform(self) -> contextlib.ExitStack:
        return current_platform.allow()

    def require_environment(self, worker_id: str, env: Mapping[str, str]) -> None:
        # A job of one rank connects to no address, so that its address may be replaced.
        shared = _ADDRESS if env.get("WORLD_SIZE") == "1" else ()
        for name, value in env.items():
            for owner, variables in list(self._set_by.items()):
                current = variables.get(name, value)
                if owner != worker_id and current != value and name not in shared:
                    raise InvalidSpecError(
                        role=worker_id.rpartition("/")[0],
                        field=f"environment variable {name} of {worker_id}",
                        value=value,
                        expected=f"{current!r}, as set by {owner}: inline workers share one "
                        "process and its environment. Use replicas=1, or the 'local' scheduler",
                    )
        self._set_by.setdefault(worker_id, {}).update(env)

    async def close(self) -> None:
        for name in set(os.environ) - set(self._environment):
            del os.environ[name]
        os.environ.update(self._environment)


class InlineTransport(Transport):
    """Passes requests to an EngineHost in this process; ``on_end`` is called when it ends."""

    def __init__(self, host: EngineHost, on_end: Callable[[], object]) -> None:
        self._host = host
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Awaited, None] = {}
        self._has_ended = False

    def post(self, outgoing: Outgoing, awaited: Awaited, leader: Leader | None = None) -> None:
        if self._has_ended:
            raise TransportLostError("the inline worker has ended")
        loop = self._loop
        self._waiting[awaited] = None

        def answered(answer: Reply, result: Payload) -> None:
            if awaited in self._waiting:
                del self._waiting[awaited]
                awaited.replied(answer, result)

        def reply(answer: Reply, result: Payload) -> None:
            loop.call_soon_threadsafe(answered, answer, result)

        self._host.handle(outgoing.request, outgoing.payload, reply)

    async def ending(self) -> Ending:
        return Ending("was ended by its controller")

    async def kill(self) -> None:
        self._host.close()
        self._on_end()
        self._has_ended = True
        while self._waiting:
            self._waiting.popitem()[0].failed(TransportLostError("the inline worker has ended"))
