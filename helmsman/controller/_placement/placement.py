"""The node and devices of a worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from helmsman.api.plan import PlannedWorker, Reservation
from helmsman.api.platforms import PLATFORMS, DeviceGrant
from helmsman.api.scheduler import SchedulingSpec
from helmsman.controller._placement.colocation import Share


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A node, and the devices on it that a worker may use."""

    node_id: str = ""
    node: str
    """Address of the node."""
    num_devices: int = 0
    devices: tuple[str, ...] = ()
    """Physical ids in order; they may be unknown until the worker runs."""
    positions: tuple[int, ...] = ()
    """Positions of these among the node's devices."""
    accelerator: str = ""
    """Ray's resource of the devices; empty for a worker without devices."""
    shared: bool = False
    """Whether the devices belong to another worker, beside which this one is forked."""
    instance_devices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(address of the node, ids of its devices) for each bundle of a deferred instance; the worker is in the first bundle."""

    @staticmethod
    def planned(worker: PlannedWorker, accelerator: str) -> Placement:
        """Return the place that a plan assigns to a worker."""
        return Placement(
            node_id=worker.node_id,
            node=worker.node,
            num_devices=worker.num_devices,
            devices=worker.devices,
            accelerator=accelerator if worker.num_devices else "",
        )

    @staticmethod
    def beside(share: Share, targets: Sequence[Placement]) -> Placement:
        """Return the place of a sibling that gets this share of its target's workers, which are at ``targets``."""
        ranks, worker = share
        first = targets[ranks[0]]
        whole = len(ranks) == 1 and worker.num_devices == first.num_devices
        place = Placement.planned(worker, first.accelerator)
        return msgspec.structs.replace(place, shared=True, instance_devices=first.instance_devices if whole else ())

    @property
    def kind(self) -> str:
        """Key in PLATFORMS of its devices; empty for a worker without devices."""
        return next((info.name for info in PLATFORMS.values() if self.devices and info.ray_resource == self.accelerator), "")

    def grant(self, worker_id: str) -> DeviceGrant:
        """Return the devices that a worker in this place must see."""
        return DeviceGrant(worker_id=worker_id, kind=self.kind, ids=self.devices)

    def as_reservation(self) -> Reservation:
        """Return the place in the form of the public API."""
        return Reservation(node_id=self.node_id, node=self.node, devices=self.devices)

    def as_planned(self, worker_id: str) -> PlannedWorker:
        """Return the place in the form of a plan."""
        return PlannedWorker(
            worker_id=worker_id, node_id=self.node_id, node=self.node, num_devices=self.num_devices, devices=self.devices
        )


def in_device_order(specs: Sequence[SchedulingSpec], places: Sequence[Placement]) -> list[int]:
    """Return the index of the place for each rank, so that the ranks of a node follow the order of its devices.

    Only ranks on one node with equal specs are exchanged. Ray promises no order of the devices it grants (ray#59547).
    """
    alike: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    different: list[SchedulingSpec] = []
    for index, (spec, place) in enumerate(zip(specs, places, strict=True)):
        if spec not in different:
            different.append(spec)
        alike[place.node_id, different.index(spec)].append(index)
    order = list(range(len(places)))
    for ranks in alike.values():
        origins = sorted(ranks, key=lambda index: places[index].positions)
        for rank, origin in zip(ranks, origins, strict=True):
            order[rank] = origin
    return order
