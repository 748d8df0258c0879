"""RayScheduler: a placement group per instance and a RayRPCServer actor per worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from helmsman.api import errors
from helmsman.api.extras import needed_by
from helmsman.api.plan import Reservation
from helmsman.api.platform_kinds import PLATFORMS
from helmsman.api.scheduler import Job, Leaving, ResultHandle, Timeouts
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._aio.event_loop import await_all
from helmsman.controller._node.devices import physical_ids, visibility
from helmsman.controller._placement.place import Place, in_device_order
from helmsman.controller._placement.resources import ACCELERATORS, Resources, show
from helmsman.controller._placement.snapshot import ClusterSnapshot, NodeState
from helmsman.controller._ray_backend.before_import import choose_authentication, outliving_the_raylet
from helmsman.controller._ray_backend.embedded import (
    blocking,
    bounded,
    current,
    end_embedded_ray,
    forget_lost,
    is_own_node,
    script_is_failing,
)
from helmsman.controller._ray_backend.embedded_start import connect
from helmsman.controller._ray_backend.process_watch import EmbeddedRay
from helmsman.controller._schedulers.base import SchedulerBase
from helmsman.controller._schedulers.role import Role, rank_of
from helmsman.controller._transport.base import TransportLostError, tail_of
from helmsman.controller._transport.channel import ChannelTransport
from helmsman.controller._transport.client import WorkerClient
from helmsman.rpc_server._process.environment import absolute_search_path
from helmsman.rpc_server._wire.tls import uses_tls

choose_authentication()

with needed_by("RayScheduler", "ray"), outliving_the_raylet():
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from helmsman.controller._ray_backend import cluster_state
    from helmsman.controller._ray_backend import placement_groups as placement
    from helmsman.controller._ray_backend.address import choose_address
    from helmsman.controller._ray_backend.holders import describe_holders
    from helmsman.controller._ray_backend.placement_groups import get_placement_group_master_ip_and_port
    from helmsman.controller._ray_backend.transport import ControllerStore, RayWorker
    from helmsman.rpc_server._host.handles import HandleStore
    from helmsman.rpc_server._server.ray_server import Granted, Greeting, RayRPCServer

__all__ = ["RayScheduler", "get_placement_group_master_ip_and_port"]

T = TypeVar("T")

INSTANCE_DEVICES_ENV_VAR = "HELMSMAN_INSTANCE_DEVICES"
"""In a worker of a deferred job: [[address, [device id, ...]], ...] for each node of its instance, its own first."""

log = logging.getLogger(__name__)

_ACTOR_OPTIONS: dict[str, Any] = {"concurrency_groups": {"control": 64}}
_ACTOR_CLASS: Any = ray.remote(**_ACTOR_OPTIONS)(RayRPCServer)
_NODES_POLL_S = 0.2


class RayScheduler(SchedulerBase):
    """Workers as Ray actors; see SchedulerBase for the other arguments.

    It uses the Ray that this process is connected to; else, if given or in RAY_ADDRESS, joins the cluster at that address; else
    starts an embedded one, which ends with this scheduler, and with this process in any case.

    Args:
        address: a cluster's address, 'auto' for the one cluster of this machine, or 'local' for an embedded one in any case.
        num_cpus, num_gpus, resources: logical resources of an embedded cluster; what Ray finds on the machine when None.
        num_nodes: nodes to wait for, at most ``timeouts.start_s``; those that are there will do when None.
        preload: modules that every worker of an embedded cluster finds imported already, since it is forked from a process that
            has imported them. Importing torch costs a worker more than a second otherwise. None lets Ray start its workers
            itself, as it does on any other cluster.

    Each worker is called by a connection of its own: a Unix socket on this machine, TCP to other machines, with TLS unless
    HELMSMAN_TLS=0 is set where the script runs. A worker on another machine listens on a port of HELMSMAN_PORT_RANGE where that
    is set on its node, else of Ray's range of worker ports.

    Raises: AmbiguousAddressError, ClusterNotFoundError, NodesMissingError, RayStartError, ClusterNotUpError (a launcher has
        started the script on several nodes, without a cluster of them); ValueError where HELMSMAN_TLS is neither 0 nor 1.

    When the gcs_server or the raylet of an embedded cluster exits, the cluster is lost: calls fail with WorkerFailedError,
    everything else with ClusterLostError, and this process is disconnected from it and can start another scheduler.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        log_dir: str | Path | None = None,
        timeouts: Timeouts | None = None,
        address: str | None = None,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        resources: dict[str, float] | None = None,
        num_nodes: int | None = None,
        preload: Sequence[str] | None = ("torch",),
    ) -> None:
        forget_lost()
        address, tls = choose_address(address), uses_tls(os.environ)
        super().__init__(seed=seed, log_dir=log_dir, timeouts=timeouts)
        self._owns_ray = address is not None
        self._ray: EmbeddedRay | None = None
        self._prefix = f"helmsman/{self.run_id}"
        self._tls = tls
        try:
            if address is not None:
                sizes = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": resources} if address == "local" else {}
                connect(address, self.run_id, sizes, self._log_dir, preload, self.timeouts.start_s)
            self._ray = current()
            self._here = ray.get_runtime_context().get_node_id()
            if num_nodes is not None:
                self._await_nodes(num_nodes)
        except BaseException:
            self.close()
            raise

    def _await_nodes(self, num_nodes: int) -> None:
        deadline = Deadline(self.timeouts.start_s)
        num_seen = -1
        while len(nodes := self._snapshot().nodes) < num_nodes:
            if len(nodes) != num_seen:
                num_seen = len(nodes)
                names = ", ".join(node.hostname or node.address for node in nodes)
                log.warning("waiting for nodes: %d of %d have joined: %s", num_seen, num_nodes, names)
            if deadline.passed:
                present = [f"{node.hostname or node.address} ({show(_devices(node))})" for node in nodes]
                raise errors.NodesMissingError(
                    num_expected=num_nodes, present=present, elapsed_s=deadline.elapsed_s, limit_s=deadline.limit_s
                )
            time.sleep(min(_NODES_POLL_S, max(deadline.remaining_s, 0.0)))

    @property
    def n_gpus_per_node(self) -> int:
        return int(max(node.total.get(name, 0.0) for node in self._snapshot().nodes for name in ACCELERATORS))

    def _snapshot(self) -> ClusterSnapshot:
        self._require_ray()
        return blocking(cluster_state.snapshot)

    def _require_ray(self) -> None:
        """Raise ClusterLostError if the embedded cluster of this scheduler is lost."""
        if self._ray is not None:
            self._ray.require()

    def _holders(self, jobs: Sequence[Job]) -> str:
        return blocking(describe_holders, self._prefix, jobs)

    async def _reserve(
        self, jobs: Sequence[Job], deadline: Deadline, resources: Mapping[str, contextlib.AsyncExitStack]
    ) -> Mapping[str, Sequence[Place]]:
        self._require_ray()
        return await placement.admit(jobs, self._prefix, deadline, resources)

    async def _give_back(self, worker_id: str, place: Place, kept: Sequence[Place]) -> None:
        if isinstance(place, placement.Slot) and not any(place.shares_group_of(other) for other in kept):
            await placement.remove_created(place.group)

    async def _place_again(
        self, role: Role, worker: WorkerClient, deadline: Deadline, resources: contextlib.AsyncExitStack
    ) -> Place:
        place = worker.place
        if not (isinstance(place, placement.Slot) and await bounded(_is_going, place)):
            return place
        others = [each.place for each in role.clients.values() if each is not worker]
        await self._give_back(worker.worker_id, place, others)
        single = self._single(role.job, rank_of(worker.worker_id))
        return (await self._reserve([single], deadline, {single.role: resources}))[single.role][0]

    async def _hold(
        self, job: Job, deadline: Deadline, resources: contextlib.AsyncExitStack
    ) -> list[tuple[Place, Reservation]]:
        self._require_ray()
        slots = await placement.admit([job], self._prefix, deadline, {job.role: resources}, per_device=True)
        return await await_all(self._held(job, index, slot, deadline) for index, slot in enumerate(slots[job.role]))

    async def _held(self, job: Job, index: int, slot: placement.Slot, deadline: Deadline) -> tuple[Place, Reservation]:
        """What a group was granted, with its bundles in the order of the node's devices."""
        found: list[tuple[int, str, int]] = []
        if slot.num_devices:
            try:
                async with asyncio.timeout(deadline.remaining_s):
                    granted = await placement.devices_of(slot)
            except (TimeoutError, TransportLostError) as error:
                reason = str(error) or f"its devices could not be read within {deadline.limit_s:g} s (Timeouts.start_s)"
                raise errors.WorkerStartError(
                    role=job.role, worker_id=f"{job.role}/{index}", node=slot.node, reason=reason, log_path="", log_tail=""
                ) from error
            for bundle, grant in enumerate(granted):
                own = _with_devices(slot, grant)
                found += [(position, id_, bundle) for position, id_ in zip(own.positions, own.devices, strict=True)]
        found.sort()
        devices = tuple(id_ for _, id_, _ in found)
        place = msgspec.structs.replace(slot, devices=devices, positions=tuple(position for position, _, _ in found))
        bundles = tuple(bundle for _, _, bundle in found)
        return place, Reservation(
            node_id=slot.node_id, node=slot.node, devices=devices, bundles=bundles, placement_group=slot.group
        )

    def _why_node_stays(self, place: Place) -> str:
        if place.node_id == self._here:
            return "the script runs on it"
        return "" if is_own_node(place.node_id) else "it is a cluster that this run has not started"

    def _make_store(self) -> HandleStore:
        self._values = ControllerStore(self._reference_of)
        return self._values

    def _reference_of(self, handle: ResultHandle) -> Any:
        transport = self._client(handle.worker_id).transport
        assert isinstance(transport, ChannelTransport)
        assert isinstance(transport.process, RayWorker)
        return transport.process.publish(handle)

    async def _launch(
        self,
        job: Job,
        ranks: Sequence[int],
        places: Sequence[Place],
        deadline: Deadline,
        resources: contextlib.AsyncExitStack,
    ) -> list[WorkerClient]:
        self._require_ray()
        workers: list[RayWorker] = []
        resources.push_async_callback(_kill_all, workers)
        for place in places:
            actor = await bounded(self._actor, job, place)  # it asks the head, which may have stopped
            workers.append(RayWorker(actor, place, self._here, self._values, self._ray))

        async def greeted(rank: int, worker: RayWorker) -> tuple[Greeting, Place]:
            greeting = await self._answer(job, rank, worker, worker.greet(), deadline)
            return greeting, await self._granted(job, rank, worker, greeting, deadline)

        async def adopt(index: int, worker: RayWorker, greeting: Greeting, place: Place) -> WorkerClient:
            identity = self._identity(job, index, place.node)
            transport = await self._answer(job, index, worker, worker.adopt(identity, tls=self._tls), deadline)
            client = WorkerClient(identity.worker_id, place, greeting.pid, identity.log_path, transport, self.timeouts)
            client.environment = visibility(place.kind, place.devices)
            if place.instance_devices:
                client.environment[INSTANCE_DEVICES_ENV_VAR] = json.dumps(place.instance_devices)
            return client

        async def start(rank: int, worker: RayWorker) -> WorkerClient:
            return await adopt(rank, worker, *await greeted(rank, worker))

        if not any(place.num_devices for place in places):  # nobody's rank depends on what others were granted
            return await await_all(start(rank, worker) for rank, worker in zip(ranks, workers, strict=True))
        there = await await_all(greeted(rank, worker) for rank, worker in zip(ranks, workers, strict=True))
        order = in_device_order([job.spec(rank) for rank in ranks], [place for _, place in there])
        return await await_all(adopt(rank, workers[origin], *there[origin]) for rank, origin in zip(ranks, order, strict=True))

    def _actor(self, job: Job, place: Place) -> Any:
        options: dict[str, Any]
        if isinstance(place, placement.Slot):
            wanted = dict(place.resources)
            options = {
                "num_cpus": wanted.pop("CPU", 0),
                "num_gpus": wanted.pop("GPU", 0),
                "memory": wanted.pop("memory", None),
                "resources": wanted or None,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, place.bundle_index),
            }
        else:
            # Ray is asked for nothing: the devices are another worker's, and their ids are set explicitly.
            options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": placement.on_node(place.node_id)}
        return _ACTOR_CLASS.options(
            name=f"{job.role}/{secrets.token_hex(4)}",
            namespace=f"helmsman-{self.run_id}",
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=10_000,
            **options,
        ).remote(absolute_search_path())

    async def _answer(self, job: Job, index: int, worker: RayWorker, answer: Awaitable[T], deadline: Deadline) -> T:
        """What a worker that starts answers. Raises WorkerStartError."""
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await answer
        except TimeoutError:
            reason = f"its actor did not answer within {deadline.limit_s:g} s (Timeouts.start_s); {await worker.pending()}"
        except (TransportLostError, errors.ProtocolError) as error:
            self._require_ray()
            reason = str(error)
        raise errors.WorkerStartError(
            role=job.role,
            worker_id=f"{job.role}/{index}",
            node=worker.place.node,
            reason=reason,
            log_path=worker.log_path,
            log_tail=tail_of(worker.log_path, start=worker.log_start),
        )

    async def _granted(self, job: Job, index: int, worker: RayWorker, greeting: Greeting, deadline: Deadline) -> Place:
        """The worker's place with the ids of its devices, which Ray has chosen."""
        place = worker.place
        if place.shared or not place.num_devices:
            return place
        if not (isinstance(place, placement.Slot) and place.deferred):
            return _with_devices(place, greeting.granted)
        bundles = await self._answer(job, index, worker, placement.devices_of(place), deadline)
        everywhere = [_with_devices(place, granted).devices for granted in bundles]
        nodes = [node for node, _ in place.bundles]
        return msgspec.structs.replace(
            _with_devices(place, bundles[0]), instance_devices=tuple(zip(nodes, everywhere, strict=True))
        )

    async def leaving(self) -> dict[str, Leaving]:
        found = await super().leaving()
        self._require_ray()
        nodes = await bounded(cluster_state.draining_nodes)
        by_id = {node.node_id: node for node in nodes}
        by_address = {node.address: node for node in nodes}
        for role in list(self._roles.values()) if nodes else ():
            for worker_id, place in role.places.items():
                node = by_id.get(place.node_id)
                if isinstance(place, placement.Slot) and len(place.bundles) > 1:  # an instance that spans nodes
                    node = node or next((by_address[each] for each, _ in place.bundles if each in by_address), None)
                if node is not None:
                    found[worker_id] = Leaving(reason=f"its node {node.address} is being drained", deadline_s=node.deadline_s)
        return found

    def close(self) -> None:
        self._is_failing = script_is_failing()
        super().close()

    async def _sweep(self) -> None:
        if self._ray is not None and self._owns_ray:
            await self._ray.end(self.timeouts.shutdown_s / 2, keep_session=self._is_failing)
        elif self._owns_ray:
            await end_embedded_ray(self.timeouts.shutdown_s / 2, self._is_failing)


async def _kill_all(workers: Sequence[RayWorker]) -> None:
    await asyncio.gather(*(worker.kill() for worker in workers))


def _is_going(slot: placement.Slot) -> bool:
    """Whether a node of this instance has gone, or is about to go."""
    there = cluster_state.alive_nodes()
    addresses = {node["NodeManagerAddress"] for node in there}
    return (
        slot.node_id not in {node["NodeID"] for node in there}
        or not addresses.issuperset(node for node, _ in slot.bundles)
        or cluster_state.loss_of_node(slot.node_id) is not None
    )


def _devices(node: NodeState) -> Resources:
    return {name: amount for name, amount in node.total.items() if name in ACCELERATORS} or {"CPU": node.total.get("CPU", 0.0)}


def _with_devices(place: Place, granted: Granted) -> Place:
    kind = next(info for info in PLATFORMS.values() if info.ray_resource == place.accelerator)
    found = physical_ids(kind.name, granted.ids.get(place.accelerator, []), granted.masks.get(kind.visibility_env_var))
    return msgspec.structs.replace(
        place, devices=tuple(id_ for _, id_ in found), positions=tuple(position for position, _ in found)
    )
