"""Workers that answer at once and do nothing, for what a controller spends on a thousand of them.

Their far end is one EchoProcess; the controller's side, down to a socket for each worker, is the real one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from benchmarks.echo import EchoProcess
from helmsman.api.scheduler import Job
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._aio.event_loop import await_all
from helmsman.controller._placement.place import Place
from helmsman.controller._placement.single_machine import OneMachine
from helmsman.controller._schedulers.backend import Backend
from helmsman.controller._schedulers.local import LocalProcess, LocalTransport
from helmsman.controller._transport.base import Ending
from helmsman.controller._transport.client import WorkerClient
from helmsman.rpc_server._host.handles import SegmentStore


class _Process(LocalProcess):
    """The end of a worker that has no process of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    async def kill(self) -> None:
        """Nothing is to be ended."""

    async def wait_ended(self, limit_s: float) -> None:
        """It has."""

    async def ending(self) -> Ending:
        """As a worker's that was killed."""
        return Ending("was simulated")


class SimulatedBackend(Backend):
    """Workers that are connections to one process."""

    def __init__(self, echo: EchoProcess) -> None:
        self.allocator = OneMachine(num_gpus=0)
        self.store = SegmentStore()
        self.transports: list[LocalTransport] = []
        self._echo = echo

    async def launch(
        self,
        job: Job,
        ranks: Sequence[int],
        places: Sequence[Place],
        deadline: Deadline,
        resources: contextlib.AsyncExitStack,
    ) -> list[WorkerClient]:
        async def connect(rank: int, place: Place) -> WorkerClient:
            transport = await LocalTransport.open(self._echo.path, self._echo.key, _Process())
            resources.push_async_callback(transport.kill)
            self.transports.append(transport)
            identity = self.run.identity(job, rank, place.node)
            return WorkerClient(identity.worker_id, place, os.getpid(), identity.log_path, transport, self.run.timeouts)

        return await await_all(connect(rank, place) for rank, place in zip(ranks, places, strict=True))
