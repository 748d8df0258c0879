"""ResourceManager: holds the devices of a run and allocates them to worker groups."""

from __future__ import annotations

import datetime
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from helmsman._base.event_loop import forbid_blocking
from helmsman.api.closing import Closing
from helmsman.api.device_mapping import parse_device_mapping, wrong_mapping
from helmsman.api.errors import (
    HelmsmanError,
    InvalidSpecError,
    NotFoundError,
    ResourcesNotMetError,
    RoleExistsError,
    SchedulerClosedError,
)
from helmsman.api.plan import Node, Reservation, aligned, ranges
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.controller._scheduler.argument_types import require_integer
from helmsman.controller._scheduler.factory import make_scheduler


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device held by a ResourceManager."""

    index: int
    """Index in device mappings; devices are numbered node by node."""
    node_rank: int
    device_rank: int
    """Index on its node."""
    node_id: str
    node: str
    """Address of the node."""
    device_id: str
    placement_group: Any = None
    """Ray placement group of the node; None on other schedulers."""
    bundle: int | None = None
    """Index of the device's bundle in that group."""


class WorkerPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Node and devices of one worker."""

    rank: int
    node_rank: int
    node_id: str
    devices: tuple[Device, ...] = ()
    """In the order of the mapping. The worker's process runs on the node of the first one, and sees
    those of its node; the others are for actors that it starts in their placement groups.
    """


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """The workers placed for one holder."""

    holder: str
    workers: tuple[WorkerPlacement, ...]
    since: datetime.datetime
    colocated_with: tuple[str, ...] = ()
    """Earlier holders of any of its devices."""

    @property
    def devices(self) -> list[Device]:
        """Devices of all workers, in rank order."""
        return [device for worker in self.workers for device in worker.devices]


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's hold of a device."""

    holder: str
    rank: int
    since: datetime.datetime


class ResourceManager(Closing):
    """Holds devices of whole nodes for a run and allocates them by index.

    Devices are numbered node by node: nodes in topology order, then each node's devices in its own
    order. They are held until ``destroy_placement_group`` or ``close``. Several holders of one
    device are colocated there; the script arranges their turns.

    Args:
        num_gpus_per_node: Accelerators to hold on each node, of the cluster's kind; 0 for a run on
            CPUs.
        num_nodes: Number of nodes to hold; all nodes with enough devices when None.
        scheduler: A Scheduler, or the name of one to create, which is closed with the manager.
        num_cpus_per_gpu: CPUs to hold with each device; workers on devices request no resources of
            their own from Ray.
        name: Role under which the devices are held, for runs with several managers.

    Raises:
        ValueError: ``num_gpus_per_node`` is negative, or ``num_nodes`` is below 1.
        ResourcesNotMetError: The cluster does not have the requested nodes and devices.
        PlacementTimeoutError: Others hold the devices.
    """

    def __init__(
        self,
        num_gpus_per_node: int,
        num_nodes: int | None = None,
        *,
        scheduler: Scheduler | str = "ray",
        num_cpus_per_gpu: float = 0,
        name: str = "devices",
    ) -> None:
        if num_gpus_per_node < 0:
            raise ValueError(f"num_gpus_per_node is {num_gpus_per_node!r}; expected 0 or more")
        if num_nodes is not None and num_nodes < 1:
            raise ValueError(f"num_nodes is {num_nodes!r}; expected 1 or more, or None for all")
        self.name = name
        self._owns_scheduler = isinstance(scheduler, str)
        self.scheduler: Scheduler = (
            make_scheduler(scheduler) if isinstance(scheduler, str) else scheduler
        )
        self._allocations: dict[str, Allocation] = {}
        self._lock = threading.Lock()
        self._destroyed = False
        try:
            nodes = self.scheduler.nodes()
            self.addresses = frozenset(node.address for node in nodes)
            """Addresses of all nodes of the cluster when the manager was made."""
            reservations = self._reserve(nodes, num_gpus_per_node, num_nodes, num_cpus_per_gpu)
        except BaseException:
            if self._owns_scheduler:
                self.scheduler.close()
            raise
        self.num_gpus_per_node = num_gpus_per_node
        self.num_nodes = len(reservations)
        self.nodes: tuple[Reservation, ...] = tuple(reservations)
        """Reservation on each node, in topology order."""
        self.devices: tuple[Device, ...] = tuple(
            Device(
                index=node_rank * num_gpus_per_node + device_rank,
                node_rank=node_rank,
                device_rank=device_rank,
                node_id=held.node_id,
                node=held.node,
                device_id=device_id,
                placement_group=held.placement_group,
                bundle=held.bundles[device_rank] if held.bundles else None,
            )
            for node_rank, held in enumerate(reservations)
            for device_rank, device_id in enumerate(held.devices)
        )

    def _reserve(
        self, nodes: Sequence[Node], num_gpus: int, num_nodes: int | None, num_cpus: float
    ) -> list[Reservation]:
        scheduler = self.scheduler
        fitting = [node for node in nodes if node.num_devices >= num_gpus]
        wanted = num_nodes or max(1, len(fitting))
        if len(fitting) < wanted:
            raise ResourcesNotMetError(
                requested=f"{wanted} node{'s' if wanted > 1 else ''} with {num_gpus} devices "
                f"each, {wanted * num_gpus} in all",
                observed=_table(nodes),
                step=_step(nodes, num_gpus, wanted)
                + (
                    f", or give the scheduler num_gpus={num_gpus} for logical devices"
                    if scheduler.shares_process
                    else ""
                ),
            )
        if scheduler.shares_process or not num_gpus:  # its devices, if any, are logical
            logical = tuple(map(str, range(num_gpus)))
            return [
                Reservation(node_id=node.node_id, node=node.address, devices=logical)
                for node in fitting[:wanted]
            ]
        spec = SchedulingSpec(
            cpu=num_cpus * num_gpus,
            gpu=num_gpus,
            ray_placement_strategy="separate",
            node_packing="strict_spread",
        )
        return scheduler.reserve(Job(role=self.name, replicas=wanted, tasks=[spec]))

    # --- allocation -------------------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        """Number of devices held."""
        return len(self.devices)

    def allocate_placement_group(
        self,
        world_size: int,
        device_mapping: str | Sequence[int] | None = None,
        *,
        holder: str,
        num_cpus: float = 1,
    ) -> Allocation:
        """Allocate a node, and devices if mapped, to each worker of a holder.

        Args:
            world_size: Number of workers.
            device_mapping: Device indices, as a list, '0-7,16' or 'list(range(0,8))'. Each worker
                gets an equal, consecutive share. None: workers without devices, whose ranks take
                turns on the nodes.
            holder: Name of the holder, which has one allocation at a time.
            num_cpus: CPUs that each worker without devices will request.

        Returns:
            The allocation, kept until ``free``.

        Raises:
            InvalidSpecError: ``world_size`` or ``device_mapping`` is invalid.
            RoleExistsError: The holder has an allocation already.
            HelmsmanError: The devices were given back by ``destroy_placement_group``.
            PlacementInfeasibleError: Workers without devices need more CPUs than the nodes have.
            PlacementTimeoutError: Workers without devices need CPUs that others hold.
        """
        require_integer("allocate_placement_group", "world_size", world_size)
        if world_size < 1:
            raise InvalidSpecError(
                role=holder, field="world_size", value=world_size, expected="1 or more"
            )
        if self._destroyed:
            raise HelmsmanError(
                f"the devices of ResourceManager {self.name!r} were released; create another "
                f"ResourceManager for {holder!r}."
            )
        with self._lock:
            if holder in self._allocations:
                raise RoleExistsError(
                    role=holder, num_workers=len(self._allocations[holder].workers)
                )
        if device_mapping is None:
            workers = self._spread(world_size, holder, num_cpus)
        else:
            workers = self._map(world_size, parse_device_mapping(device_mapping, holder), holder)
        with self._lock:
            taken = {device.index for worker in workers for device in worker.devices}
            others = [
                each.holder
                for each in self._allocations.values()
                if taken & {device.index for device in each.devices}
            ]
            allocation = Allocation(
                holder=holder,
                workers=tuple(workers),
                since=datetime.datetime.now(datetime.UTC),
                colocated_with=tuple(others),
            )
            self._allocations[holder] = allocation
        return allocation

    def _map(self, world_size: int, mapping: Sequence[int], holder: str) -> list[WorkerPlacement]:
        def refuse(expected: str) -> InvalidSpecError:
            return wrong_mapping(holder, ranges(mapping), expected)

        if max(mapping) >= self.num_devices:
            has = f"0 to {self.num_devices - 1}" if self.num_devices else "none"
            held = f"{has} ({self.num_nodes} nodes x {self.num_gpus_per_node})"
            raise refuse(f"devices that this ResourceManager holds, which are {held}")
        size, rest = divmod(len(mapping), world_size)
        if rest or not size:
            raise refuse(f"a multiple of {world_size} devices, an equal share per worker")
        devices = [self.devices[index] for index in mapping]
        shares = [tuple(devices[first : first + size]) for first in range(0, len(devices), size)]
        return [self._placed(rank, each[0].node_rank, each) for rank, each in enumerate(shares)]

    def _spread(self, world_size: int, holder: str, num_cpus: float) -> list[WorkerPlacement]:
        node_ids = [held.node_id for held in self.nodes]
        spec = SchedulingSpec(cpu=num_cpus, nodelist=node_ids, node_packing="spread")
        plan = self.scheduler.plan(Job(role=holder, replicas=world_size, tasks=[spec]))
        num_of = Counter(node_ids.index(worker.node_id) for worker in plan.roles[0].workers)
        # Consecutive ranks take turns on the nodes.
        turns = sorted((turn, node) for node, num in num_of.items() for turn in range(num))
        return [self._placed(rank, node) for rank, (_, node) in enumerate(turns)]

    def _placed(
        self, rank: int, node_rank: int, devices: tuple[Device, ...] = ()
    ) -> WorkerPlacement:
        node_id = self.nodes[node_rank].node_id
        return WorkerPlacement(rank=rank, node_rank=node_rank, node_id=node_id, devices=devices)

    def free(self, holder: str) -> None:
        """Remove a holder's allocation, if any; its workers are not affected."""
        with self._lock:
            self._allocations.pop(holder, None)

    # --- look-ups ---------------------------------------------------------------------------------

    @property
    def allocations(self) -> Mapping[str, Allocation]:
        """Allocations by holder, in order of creation."""
        with self._lock:
            return dict(self._allocations)

    def holders(self, device: int) -> list[Holding]:
        """Workers that hold a device, longest first.

        Raises:
            IndexError: There is no such device.
        """
        if not 0 <= device < self.num_devices:
            raise IndexError(
                f"device is {device}; this ResourceManager holds {self.num_devices} devices, "
                "counted from 0"
            )
        return [
            Holding(holder=each.holder, rank=worker.rank, since=each.since)
            for each in self.allocations.values()
            for worker in each.workers
            if any(held.index == device for held in worker.devices)
        ]

    def table(self) -> str:
        """Format one line per device: index, node, physical id, holders and since when."""
        rows = [("device", "node", "id", "held by")]
        for device in self.devices:
            held = ", ".join(
                f"{each.holder}/{each.rank} since {each.since:%H:%M:%S}"
                for each in self.holders(device.index)
            )
            node = f"{device.node_rank} ({device.node})"
            rows.append((str(device.index), node, device.device_id, held or "-"))
        return aligned(rows)

    # --- teardown ---------------------------------------------------------------------------------

    def destroy_placement_group(self) -> None:
        """Give all devices back; workers that use them end. Idempotent."""
        if self._destroyed:
            return
        forbid_blocking()  # before the devices count as given back
        self._destroyed = True
        with self._lock:
            self._allocations.clear()
        if any(held.devices for held in self.nodes) and not self.scheduler.shares_process:
            try:
                self.scheduler.delete_workers(self.name)
            except (NotFoundError, SchedulerClosedError):
                return  # the role was deleted already, or ended with the scheduler

    def close(self) -> None:
        """Give all devices back; close the scheduler if the manager created it. Idempotent."""
        self.destroy_placement_group()
        if self._owns_scheduler:
            self.scheduler.close()


def _table(nodes: Sequence[Node]) -> str:
    rows = [("node", "devices", "free", "CPU", "free")]
    for node in nodes:
        named = node.hostname not in ("", node.address)
        name = f"{node.hostname} ({node.address})" if named else node.address
        devices = f"{node.num_devices} {node.accelerator}".strip()
        cpus, free_cpus = f"{node.num_cpus:g}", f"{node.num_free_cpus:g}"
        rows.append((name, devices, str(node.num_free_devices), cpus, free_cpus))
    return aligned(rows)


def _step(nodes: Sequence[Node], num_gpus: int, wanted: int) -> str:
    smaller = [
        size
        for size in {node.num_devices for node in nodes}
        if 0 < size < num_gpus and sum(node.num_devices >= size for node in nodes) >= wanted
    ]
    options = [f"set num_gpus_per_node to {max(smaller)}"] if smaller else []
    if fitting := sum(node.num_devices >= num_gpus for node in nodes):
        options.append(f"set num_nodes to {fitting}")
    text = ", or ".join([*options, "add nodes"])
    return text[0].upper() + text[1:]
