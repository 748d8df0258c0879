"""Simulated workers that answer at once, to measure the controller's cost of a thousand of them.

One EchoProcess is the peer of all of them; the controller's side, with a socket for each worker, is
real.
"""

from __future__ import annotations

import functools
import os

from benchmarks.echo import EchoProcess
from helmsman._base.event_loop import await_all
from helmsman._wire import auth
from helmsman.controller._placement.allocator import OneMachine
from helmsman.controller._placement.placement import Placement
from helmsman.controller._scheduler.backend import Backend, Launch
from helmsman.controller._scheduler.transport.base import Ending
from helmsman.controller._scheduler.transport.channel import Channel
from helmsman.controller._scheduler.transport.client import WorkerClient
from helmsman.rpc_server._host.handles import SegmentStore


class _Process:
    """Stands for the process of a worker that has none."""

    async def kill(self) -> None:
        """Do nothing, since there is no process."""

    async def wait_ended(self, limit_s: float) -> None:
        """Return at once, since there is no process."""

    async def observe(self, limit_s: float) -> bytes:
        """Return an empty observation."""
        return b""

    async def ending(self, lost_because: str) -> Ending:
        """Return the ending of a killed worker."""
        return Ending("was simulated")


class SimulatedBackend(Backend):
    """Workers that are connections to one process."""

    def __init__(self, echo: EchoProcess) -> None:
        self.allocator = OneMachine(num_gpus=0)
        self.store = SegmentStore()
        self.transports: list[Channel] = []
        self._echo = echo

    async def launch(self, start: Launch) -> list[WorkerClient]:
        async def connect(rank: int, place: Placement) -> WorkerClient:
            connecting = functools.partial(auth.connect, self._echo.path, self._echo.key, 30.0)
            transport = Channel(
                f"{start.job.role}/{rank}", connecting, _Process(), shares_memory=True
            )
            await transport.open()
            start.undo.push_async_callback(transport.kill)
            self.transports.append(transport)
            identity = self.run.identity(start.job, rank, place.node)
            return WorkerClient(
                identity.worker_id,
                place,
                os.getpid(),
                identity.log_path,
                transport,
                self.run.timeouts,
            )

        return await await_all(connect(*pair) for pair in start.places.items())
