"""Places on the nodes of a Ray cluster: a placement group per instance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from helmsman.api.platforms import PLATFORMS
from helmsman.api.scheduler import Job, PreemptionNotice
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._aio.event_loop import await_all
from helmsman.controller._node.devices import physical_ids
from helmsman.controller._placement.allocator import Allocator
from helmsman.controller._placement.placement import Placement
from helmsman.controller._placement.snapshot import ClusterSnapshot
from helmsman.controller._ray_backend import cluster_state
from helmsman.controller._ray_backend import placement_groups as placement
from helmsman.controller._ray_backend.embedded import EmbeddedRay, blocking, bounded, is_own_node
from helmsman.controller._schedulers.backend import start_error
from helmsman.controller._transport.base import TransportLostError
from helmsman.rpc_server._server.ray_server import Granted


class RayAllocator(Allocator):
    """Takes placement groups.

    Args:
        prefix: of the names of the run's groups.
        embedded: the embedded cluster; None on any other.
        here: id of the script's node.
    """

    def __init__(self, prefix: str, embedded: EmbeddedRay | None, here: str) -> None:
        self._prefix = prefix
        self._ray = embedded
        self._here = here

    def require_ray(self) -> None:
        """Raise ClusterLostError if the embedded cluster is lost."""
        if self._ray is not None:
            self._ray.require()

    def snapshot(self) -> ClusterSnapshot:
        self.require_ray()
        return blocking(cluster_state.snapshot)

    def holders(self, jobs: Sequence[Job]) -> str:
        return blocking(cluster_state.describe_holders, self._prefix, jobs)

    async def reserve(
        self, jobs: Sequence[Job], deadline: Deadline, resources: Mapping[str, contextlib.AsyncExitStack]
    ) -> Mapping[str, Sequence[Placement]]:
        self.require_ray()
        return await placement.admit(jobs, self._prefix, deadline, resources)

    async def give_back(self, worker_id: str, place: Placement, kept: Sequence[Placement]) -> None:
        if isinstance(place, placement.BundleSlot) and not any(place.shares_group_of(other) for other in kept):
            await placement.remove_created(place.group)

    async def is_lost(self, place: Placement) -> bool:
        return isinstance(place, placement.BundleSlot) and await bounded(_is_going, place)

    async def hold(self, job: Job, deadline: Deadline, resources: contextlib.AsyncExitStack) -> Sequence[Placement]:
        self.require_ray()
        slots = await placement.admit([job], self._prefix, deadline, {job.role: resources}, per_device=True)
        return await await_all(self._held(job, index, slot, deadline) for index, slot in enumerate(slots[job.role]))

    async def _held(self, job: Job, index: int, slot: placement.BundleSlot, deadline: Deadline) -> Placement:
        """The slot with the devices that its group was granted, in the order of the node."""
        if not slot.num_devices:
            return slot
        try:
            async with asyncio.timeout(deadline.remaining_s):
                granted = await placement.devices_of(slot)
        except (TimeoutError, TransportLostError) as error:
            reason = str(error) or f"its devices could not be read within {deadline.limit_s:g} s (Timeouts.start_s)"
            raise start_error(f"{job.role}/{index}", slot.node, reason) from error
        found: list[tuple[int, str, int]] = []
        for bundle, grant in enumerate(granted):
            own = with_devices(slot, grant)
            found += [(position, id_, bundle) for position, id_ in zip(own.positions, own.devices, strict=True)]
        positions, devices, bundles = zip(*sorted(found), strict=True)
        return msgspec.structs.replace(slot, positions=positions, devices=devices, device_bundles=bundles)

    async def preemption_notices(self, places: Mapping[str, Placement]) -> dict[str, PreemptionNotice]:
        self.require_ray()
        draining = await bounded(cluster_state.draining_nodes)
        found: dict[str, PreemptionNotice] = {}
        for worker_id, place in places.items() if draining else ():
            nodes = [place.node_id]
            if isinstance(place, placement.BundleSlot) and len(place.bundles) > 1:  # an instance that spans nodes
                nodes += [address for address, _ in place.bundles]
            if notice := next((draining[node] for node in nodes if node in draining), None):
                found[worker_id] = notice
        return found

    def why_node_stays(self, place: Placement) -> str:
        if place.node_id == self._here:
            return "the script runs on it"
        return "" if is_own_node(place.node_id) else "it is a cluster that this run has not started"


def _is_going(slot: placement.BundleSlot) -> bool:
    """Whether a node of this instance has gone, or is about to go."""
    there = cluster_state.alive_nodes()
    addresses = {node["NodeManagerAddress"] for node in there}
    return (
        slot.node_id not in {node["NodeID"] for node in there}
        or not addresses.issuperset(node for node, _ in slot.bundles)
        or cluster_state.loss_of_node(slot.node_id) is not None
    )


def with_devices(place: Placement, granted: Granted) -> Placement:
    """The place with the ids of the devices that Ray has granted there."""
    kind = next(info for info in PLATFORMS.values() if info.ray_resource == place.accelerator)
    found = physical_ids(kind.name, granted.ids.get(place.accelerator, []), granted.masks.get(kind.visibility_env_var))
    return msgspec.structs.replace(
        place, devices=tuple(id_ for _, id_ in found), positions=tuple(position for position, _ in found)
    )
