"""RayScheduler: one placement group per instance and one RayRPCServer actor per worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from helmsman._base.event_loop import Deadline, await_all
from helmsman._process.devices import physical_ids, visibility
from helmsman._process.environment import absolute_search_path
from helmsman._process.main_thread import OFFER_VARIABLE
from helmsman._wire.tls import uses_tls
from helmsman.api import errors
from helmsman.api.environment import INSTANCE_DEVICES_ENV_VAR
from helmsman.api.platforms import PLATFORMS
from helmsman.api.scheduler import Job, PreemptionNotice, ResultHandle, Timeouts
from helmsman.controller._placement.allocator import Allocator
from helmsman.controller._placement.placement import Placement, in_device_order
from helmsman.controller._placement.resources import (
    ACCELERATORS,
    ClusterSnapshot,
    NodeState,
    Resources,
    show,
)
from helmsman.controller._scheduler.backend import Backend, Launch, Run, start_error
from helmsman.controller._scheduler.backend_scheduler import BackendScheduler
from helmsman.controller._scheduler.driver_log import script_failure
from helmsman.controller._scheduler.ray.embedded import (
    EmbeddedRay,
    blocking,
    bounded,
    current,
    end_connection,
    importing_ray,
    settle,
)
from helmsman.controller._scheduler.ray.embedded_start import connect
from helmsman.controller._scheduler.transport.base import TransportLostError
from helmsman.controller._scheduler.transport.channel import Channel
from helmsman.controller._scheduler.transport.client import WorkerClient
from helmsman.rpc_server._ray_forks.install import are_workers_forked

with importing_ray("RayScheduler"):
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from helmsman.controller._scheduler.ray import cluster_state
    from helmsman.controller._scheduler.ray import placement_groups as placement
    from helmsman.controller._scheduler.ray.cluster_state import choose_address
    from helmsman.controller._scheduler.ray.placement_groups import (
        get_placement_group_master_ip_and_port,
    )
    from helmsman.controller._scheduler.ray.transport import ControllerStore, RayWorker
    from helmsman.rpc_server._server.ray_server import Granted, Greeting, RayRPCServer

__all__ = ["RayScheduler", "get_placement_group_master_ip_and_port"]

T = TypeVar("T")

log = logging.getLogger(__name__)

_ACTOR_OPTIONS: dict[str, Any] = {"concurrency_groups": {"control": 64}}
_ACTOR_CLASS: Any = ray.remote(**_ACTOR_OPTIONS)(RayRPCServer)
_NODES_POLL_S = 0.2


class RayScheduler(BackendScheduler):
    """Runs workers as Ray actors.

    It uses the Ray cluster that this process is connected to, if any. Otherwise it joins the
    cluster at ``address`` or RAY_ADDRESS. Without either it starts an embedded cluster, which ends
    with this scheduler, and at the latest with this process.

    Each worker is called over its own connection: a Unix socket on this machine, TCP to other
    machines. TCP uses TLS unless HELMSMAN_TLS=0 is set in the script's environment. A worker on
    another machine listens on a port in its node's HELMSMAN_PORT_RANGE, or else in Ray's range of
    worker ports.

    If the gcs_server or the raylet of an embedded cluster exits, the cluster is lost: calls raise
    WorkerFailedError, other operations ClusterLostError. This process is then disconnected from it
    and can start another scheduler.

    Args:
        seed: Seed of the run; each worker derives its own from (seed, role, rank).
        log_dir: Folder for one log file per worker. When None: ``helmsman/<host>/<run id>`` in
            XDG_STATE_HOME if it is set, else ``helmsman-<user>/<run id>`` in the temporary folder.
        timeouts: Limits in seconds by class of operation; the defaults of Timeouts when None.
        address: Address of a cluster; 'auto' for the only cluster on this machine; 'local' to start
            an embedded one.
        num_cpus: Logical CPUs of an embedded cluster; those that Ray detects when None.
        num_gpus: Logical GPUs of an embedded cluster; those that Ray detects when None.
        resources: Custom resources of an embedded cluster by name.
        num_nodes: Number of nodes to wait for, at most ``timeouts.start_s`` seconds; no wait when
            None.
        preload: Modules imported before workers of an embedded cluster are forked, so that no
            worker imports them again. Importing torch costs a worker more than a second otherwise.
            None lets Ray start its workers itself, as on any other cluster.

    Raises:
        AmbiguousAddressError: Several clusters match, or the process is connected to another one.
        ClusterNotFoundError: No cluster answers at the address.
        ClusterNotUpError: A launcher has started the script on several nodes without a cluster of
            them.
        NodesMissingError: Fewer than ``num_nodes`` nodes have joined in time.
        RayStartError: The embedded cluster did not start.
        ValueError: HELMSMAN_TLS is neither 0 nor 1.
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
        settle((timeouts or Timeouts()).start_s)
        address, tls = choose_address(address), uses_tls(os.environ)
        sizes = (
            {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": resources}
            if address == "local"
            else {}
        )
        backend = RayBackend(address, sizes, num_nodes, preload, tls=tls)
        super().__init__(backend, seed=seed, log_dir=log_dir, timeouts=timeouts)


class RayBackend(Backend):
    """Starts one actor per worker.

    ``address`` is None for the cluster that this process is already connected to.
    """

    allocator: RayAllocator
    store: ControllerStore

    def __init__(
        self,
        address: str | None,
        sizes: dict[str, Any],
        num_nodes: int | None,
        preload: Sequence[str] | None,
        *,
        tls: bool,
    ) -> None:
        self._address = address
        self._sizes = sizes
        self._num_nodes = num_nodes
        self._preload = preload
        self._tls = tls
        self._ray: EmbeddedRay | None = None
        self._is_failing = False

    def open(self, run: Run, find_worker: Callable[[str], WorkerClient]) -> None:
        super().open(run, find_worker)
        if self._address is not None:
            connect(
                self._address, run.id, self._sizes, run.log_dir, self._preload, run.timeouts.start_s
            )
        self._ray = current()
        if self._ray is not None:
            run.upkeep.add("Ray's session folder", self._ray.session.renew)
        self._here = ray.get_runtime_context().get_node_id()

        def reference_of(handle: ResultHandle) -> Any:
            transport = find_worker(handle.worker_id).transport
            assert isinstance(transport, Channel)
            assert isinstance(transport.process, RayWorker)
            return transport.process.publish(handle)

        self.store = ControllerStore(reference_of)
        self.allocator = RayAllocator(f"helmsman/{run.id}", self._ray, self._here)
        if self._num_nodes is not None:
            self._await_nodes(self._num_nodes)

    def _await_nodes(self, num_nodes: int) -> None:
        deadline = Deadline(self.run.timeouts.start_s)
        num_seen = -1
        while len(nodes := self.allocator.snapshot().nodes) < num_nodes:
            if len(nodes) != num_seen:
                num_seen = len(nodes)
                names = ", ".join(node.hostname or node.address for node in nodes)
                log.warning(
                    "waiting for nodes: %d of %d have joined: %s", num_seen, num_nodes, names
                )
            if deadline.passed:
                present = [
                    f"{node.hostname or node.address} ({show(_devices(node))})" for node in nodes
                ]
                raise errors.NodesMissingError(
                    num_expected=num_nodes,
                    present=present,
                    elapsed_s=deadline.elapsed_s,
                    limit_s=deadline.limit_s,
                )
            time.sleep(min(_NODES_POLL_S, max(deadline.remaining_s, 0.0)))

    async def launch(self, start: Launch) -> list[WorkerClient]:
        job, places, deadline, undo = start
        self.allocator.require_ray()
        if self._ray is not None and (reason := self._ray.removal):
            rank, place = next(iter(places.items()))
            raise start_error(f"{job.role}/{rank}", place.node, reason)
        workers: list[RayWorker] = []
        undo.push_async_callback(_kill_all, workers)
        for place in places.values():
            # in a thread with a limit: creating an actor calls the head, which may have stopped
            actor = await bounded(self._actor, job, place)
            workers.append(RayWorker(actor, place, self._here, self.store, self._ray))

        async def greeted(rank: int, worker: RayWorker) -> tuple[Greeting, Placement]:
            greeting = await self._answer(job, rank, worker, worker.greet(), deadline)
            return greeting, await self._granted(job, rank, worker, greeting, deadline)

        async def adopt(
            index: int, worker: RayWorker, greeting: Greeting, place: Placement
        ) -> WorkerClient:
            identity = self.run.identity(job, index, place.node)
            transport = await self._answer(
                job, index, worker, worker.adopt(identity, tls=self._tls), deadline
            )
            client = WorkerClient(
                identity.worker_id,
                place,
                greeting.pid,
                identity.log_path,
                transport,
                self.run.timeouts,
            )
            client.environment = visibility(place.kind, place.devices)
            if place.instance_devices:
                client.environment[INSTANCE_DEVICES_ENV_VAR] = json.dumps(place.instance_devices)
            return client

        async def started(rank: int, worker: RayWorker) -> WorkerClient:
            return await adopt(rank, worker, *await greeted(rank, worker))

        if not any(place.num_devices for place in places.values()):
            # Without devices, ranks need not be ordered by device.
            return await await_all(
                started(rank, worker) for rank, worker in zip(places, workers, strict=True)
            )
        there = await await_all(
            greeted(rank, worker) for rank, worker in zip(places, workers, strict=True)
        )
        order = in_device_order([job.spec(rank) for rank in places], [place for _, place in there])
        return await await_all(
            adopt(rank, workers[origin], *there[origin])
            for rank, origin in zip(places, order, strict=True)
        )

    def _actor(self, job: Job, place: Placement) -> Any:
        options: dict[str, Any]
        if isinstance(place, placement.BundleSlot):
            wanted = dict(place.resources)
            options = {
                "num_cpus": wanted.pop("CPU", 0),
                "num_gpus": wanted.pop("GPU", 0),
                "memory": wanted.pop("memory", None),
                "resources": wanted or None,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    place.group, place.bundle_index
                ),
            }
        else:
            # No resources are requested from Ray: another worker holds the devices, and their ids
            # are set explicitly.
            options = {
                "num_cpus": 0,
                "num_gpus": 0,
                "scheduling_strategy": placement.on_node(place.node_id),
            }
        if are_workers_forked():
            # Engine code may use SIGALRM, which needs the main thread.
            options["runtime_env"] = {"env_vars": {OFFER_VARIABLE: "1"}}
        return _ACTOR_CLASS.options(
            name=f"{job.role}/{secrets.token_hex(4)}",
            namespace=f"helmsman-{self.run.id}",
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=10_000,
            **options,
        ).remote(absolute_search_path())

    async def _answer(
        self, job: Job, index: int, worker: RayWorker, answer: Awaitable[T], deadline: Deadline
    ) -> T:
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await answer
        except TimeoutError:
            reason = (
                f"its actor did not answer within {deadline.limit_s:g} s (Timeouts.start_s); "
                f"{await worker.pending()}"
            )
        except (TransportLostError, errors.ProtocolError) as error:
            self.allocator.require_ray()
            reason = str(error)
        raise start_error(
            f"{job.role}/{index}", worker.place.node, reason, worker.log_path, worker.log_start
        )

    async def _granted(
        self, job: Job, index: int, worker: RayWorker, greeting: Greeting, deadline: Deadline
    ) -> Placement:
        """The worker's place with the ids of its devices, which Ray has chosen."""
        place = worker.place
        if place.shared or not place.num_devices:
            return place
        if not (isinstance(place, placement.BundleSlot) and place.deferred):
            return _with_devices(place, greeting.granted)
        bundles = await self._answer(job, index, worker, placement.devices_of(place), deadline)
        everywhere = [_with_devices(place, granted).devices for granted in bundles]
        nodes = [node for node, _ in place.bundles]
        return msgspec.structs.replace(
            _with_devices(place, bundles[0]),
            instance_devices=tuple(zip(nodes, everywhere, strict=True)),
        )

    def closing(self) -> None:
        self._is_failing = script_failure() is not None

    async def close(self) -> None:
        if self._address is not None:
            await end_connection(
                self._ray, self.run.timeouts.shutdown_s / 2, keep_session=self._is_failing
            )


async def _kill_all(workers: Sequence[RayWorker]) -> None:
    await asyncio.gather(*(worker.kill() for worker in workers))


def _devices(node: NodeState) -> Resources:
    return {name: amount for name, amount in node.total.items() if name in ACCELERATORS} or {
        "CPU": node.total.get("CPU", 0.0)
    }


# --- places ---------------------------------------------------------------------------------------


class RayAllocator(Allocator):
    """Allocates placement groups, whose names begin with ``prefix``.

    ``here`` is the id of the script's node.
    """

    def __init__(self, prefix: str, embedded: EmbeddedRay | None, here: str) -> None:
        self._prefix = prefix
        self._ray = embedded
        self._here = here

    def require_ray(self) -> None:
        if self._ray is not None:
            self._ray.require()

    def snapshot(self) -> ClusterSnapshot:
        self.require_ray()
        return blocking(cluster_state.snapshot)

    def holders(self, jobs: Sequence[Job]) -> str:
        return blocking(cluster_state.describe_holders, self._prefix, jobs)

    async def reserve(
        self,
        jobs: Sequence[Job],
        deadline: Deadline,
        resources: Mapping[str, contextlib.AsyncExitStack],
    ) -> Mapping[str, Sequence[Placement]]:
        self.require_ray()
        return await placement.admit(jobs, self._prefix, deadline, resources)

    async def give_back(self, worker_id: str, place: Placement, kept: Sequence[Placement]) -> None:
        if isinstance(place, placement.BundleSlot) and not any(
            place.shares_group_of(other) for other in kept
        ):
            await placement.remove_created(place.group)

    async def is_lost(self, place: Placement) -> bool:
        return isinstance(place, placement.BundleSlot) and await bounded(_is_going, place)

    async def hold(
        self, job: Job, deadline: Deadline, resources: contextlib.AsyncExitStack
    ) -> Sequence[Placement]:
        self.require_ray()
        slots = await placement.admit(
            [job], self._prefix, deadline, {job.role: resources}, per_device=True
        )
        return await await_all(
            self._held(job, index, slot, deadline) for index, slot in enumerate(slots[job.role])
        )

    async def _held(
        self, job: Job, index: int, slot: placement.BundleSlot, deadline: Deadline
    ) -> Placement:
        """The slot with the devices granted to its group, in the node's device order."""
        if not slot.num_devices:
            return slot
        try:
            async with asyncio.timeout(deadline.remaining_s):
                granted = await placement.devices_of(slot)
        except (TimeoutError, TransportLostError) as error:
            reason = (
                str(error)
                or f"its devices could not be read within {deadline.limit_s:g} s (Timeouts.start_s)"
            )
            raise start_error(f"{job.role}/{index}", slot.node, reason) from error
        found: list[tuple[int, str, int]] = []
        for bundle, grant in enumerate(granted):
            own = _with_devices(slot, grant)
            found += [
                (position, id_, bundle)
                for position, id_ in zip(own.positions, own.devices, strict=True)
            ]
        positions, devices, bundles = zip(*sorted(found), strict=True)
        return msgspec.structs.replace(
            slot, positions=positions, devices=devices, device_bundles=bundles
        )

    async def preemption_notices(
        self, places: Mapping[str, Placement]
    ) -> dict[str, PreemptionNotice]:
        self.require_ray()
        draining = await bounded(cluster_state.draining_nodes)
        found: dict[str, PreemptionNotice] = {}
        for worker_id, place in places.items() if draining else ():
            nodes = [place.node_id]
            if isinstance(place, placement.BundleSlot) and len(place.bundles) > 1:
                # the instance spans several nodes
                nodes += [address for address, _ in place.bundles]
            if notice := next((draining[node] for node in nodes if node in draining), None):
                found[worker_id] = notice
        return found


def _is_going(slot: placement.BundleSlot) -> bool:
    there = cluster_state.alive_nodes()
    addresses = {node["NodeManagerAddress"] for node in there}
    return (
        slot.node_id not in {node["NodeID"] for node in there}
        or not addresses.issuperset(node for node, _ in slot.bundles)
        or cluster_state.loss_of_node(slot.node_id) is not None
    )


def _with_devices(place: Placement, granted: Granted) -> Placement:
    """The place with the ids of the devices that Ray has granted there."""
    kinds = [info for info in PLATFORMS.values() if info.ray_resource == place.accelerator]
    masks = [granted.masks.get(info.visibility_env_var) for info in kinds]
    # ROCm's mask is the last one, and Ray reads only that on its nodes.
    mask = next(filter(None, reversed(masks)), None)
    found = physical_ids(kinds[0].name, granted.ids.get(place.accelerator, []), mask)
    return msgspec.structs.replace(
        place,
        devices=tuple(id_ for _, id_ in found),
        positions=tuple(position for position, _ in found),
    )
