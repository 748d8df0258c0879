"""Workers that answer at once and do nothing, for what a controller spends on a thousand of them.

Their far end is one EchoProcess; the controller's side, down to a socket for each worker, is the real one.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence

from benchmarks.echo import EchoProcess
from helmsman.api.scheduler import Job
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._aio.event_loop import await_all
from helmsman.controller._placement.place import Place
from helmsman.controller._placement.single_machine import ADDRESS, OneMachine, without_selectors
from helmsman.controller._placement.snapshot import ClusterSnapshot
from helmsman.controller._schedulers.base import SchedulerBase
from helmsman.controller._transport.base import Ending
from helmsman.controller._transport.channel import Channel, ChannelTransport
from helmsman.controller._transport.client import WorkerClient
from helmsman.rpc_server._host.handles import HandleStore, SegmentStore
from helmsman.rpc_server._wire import auth


class _Process:
    """The end of a worker that has no process of its own."""

    async def kill(self) -> None:
        """Nothing is to be ended."""

    async def wait_ended(self, limit_s: float) -> None:
        """It has."""

    async def observe(self, limit_s: float) -> bytes:
        """Nothing can be observed."""
        return b""

    async def ending(self, lost_because: str) -> Ending:
        """As a worker's that was killed."""
        return Ending("was simulated")


class SimulatedScheduler(SchedulerBase):
    """A LocalScheduler whose workers are connections to one process."""

    def __init__(self, echo: EchoProcess) -> None:
        super().__init__()
        self._echo = echo
        self._machine = OneMachine(num_gpus=0)
        self.transports: list[ChannelTransport] = []

    @property
    def n_gpus_per_node(self) -> int:
        return 0

    def _make_store(self) -> HandleStore:
        return SegmentStore()

    def _snapshot(self) -> ClusterSnapshot:
        return self._machine.snapshot()

    def _as_planned_for(self, job: Job) -> Job:
        return without_selectors(job)

    async def _reserve(
        self, jobs: Sequence[Job], deadline: Deadline, resources: Mapping[str, contextlib.AsyncExitStack]
    ) -> Mapping[str, Sequence[Place]]:
        return {job.role: [Place(node=ADDRESS, node_id=ADDRESS)] * job.replicas for job in jobs}

    async def _launch(
        self,
        job: Job,
        ranks: Sequence[int],
        places: Sequence[Place],
        deadline: Deadline,
        resources: contextlib.AsyncExitStack,
    ) -> list[WorkerClient]:
        async def connect(rank: int, place: Place) -> WorkerClient:
            connecting = functools.partial(auth.connect, self._echo.path, self._echo.key, 30.0)
            channel = Channel(f"{job.role}/{rank}", connecting, shares_memory=True)
            await channel.open()
            transport = ChannelTransport(channel, _Process())
            resources.push_async_callback(transport.kill)
            self.transports.append(transport)
            identity = self._identity(job, rank, place.node)
            return WorkerClient(identity.worker_id, place, os.getpid(), identity.log_path, transport, self.timeouts)

        return await await_all(connect(rank, place) for rank, place in zip(ranks, places, strict=True))
