"""Creates Ray placement groups for a plan: all of them or none, under one deadline.

Each bundle is pinned to the node that the plan chose, so Ray grants it within milliseconds. If
others have taken the resources meanwhile, all groups are removed and the next attempt plans again
after a random pause. Therefore two controllers that want the same nodes cannot block each other
forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.placement_group import placement_group as create_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from helmsman._base.event_loop import Deadline, run_in_executor
from helmsman.api.errors import ClusterLostError
from helmsman.api.plan import Plan, PlannedInstance, PlannedRole, Reservation
from helmsman.api.scheduler import Job
from helmsman.controller._placement.admission import busy, require_feasible
from helmsman.controller._placement.placement import Placement
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import ClusterSnapshot, Resources
from helmsman.controller._scheduler.ray import cluster_state
from helmsman.controller._scheduler.ray.cluster_state import (
    GroupPhase,
    GroupProgress,
    describe_holders,
    is_held_by_run,
)
from helmsman.controller._scheduler.ray.embedded import answered, bounded
from helmsman.controller._scheduler.transport.base import TransportLostError
from helmsman.rpc_server._server.ray_server import Granted, granted_here

_POLL_S = (0.005, 0.1)
"""First and longest pause between polls of requested groups."""
_STALLED_S = 1.0
"""If no group is granted for this long, the nodes lack the resources that the plan expected."""
_LOOKS = 3
"""Checks in a row that must find this run itself in the way before admission fails."""
_PAUSE_S = (0.05, 0.5)
"""First and longest mean pause before the next attempt. The actual pause is random, from half to
one and a half of the mean.
"""
_TELL_S = (2.0, 30.0)
"""A waiting start logs its state after the first period, and then once per second period."""
_RETRY_NEAR_S = 0.03
"""A waiting group is not removed if the head may retry it within this time."""
_SETTLE_S = 10.0
"""Longest wait for groups in flight before they are removed regardless. At most a second is usual,
but on a busy machine a node may take seconds to reply.
"""
_REMOVE_S = _SETTLE_S + 3.0

log = logging.getLogger(__name__)


class BundleSlot(Placement, frozen=True, kw_only=True):
    """A bundle of a placement group, for one worker."""

    group: Any
    bundle_index: int
    resources: Resources
    """Resources that the worker takes of the bundle; memory in bytes. The devices of a deferred
    instance are left to its server.
    """
    bundles: tuple[tuple[str, int], ...]
    """(address of the node, number of devices) of each bundle of the instance."""
    deferred: bool
    device_bundles: tuple[int, ...] = ()
    """Bundle index of each device, if every device has its own bundle."""

    def as_reservation(self) -> Reservation:
        return msgspec.structs.replace(
            super().as_reservation(), bundles=self.device_bundles, placement_group=self.group
        )

    def shares_group_of(self, other: Placement) -> bool:
        return isinstance(other, BundleSlot) and bool(other.group.id == self.group.id)


class _GroupRequest(msgspec.Struct, frozen=True):
    role: PlannedRole
    instance: PlannedInstance
    group: PlacementGroup
    asked_at: float
    """Monotonic time just before the request, so no later than the head received it."""

    @property
    def id(self) -> str:
        return self.group.id.hex()


async def admit(
    jobs: Sequence[Job],
    prefix: str,
    deadline: Deadline,
    resources: Mapping[str, contextlib.AsyncExitStack],
    *,
    per_device: bool = False,
) -> dict[str, list[BundleSlot]]:
    """Create placement groups for all jobs, or for none.

    Args:
        jobs: Jobs to place together.
        prefix: 'helmsman/RUN', the prefix of the names of the run's groups.
        deadline: Limit of all attempts together.
        resources: Stack of each role, on which the removal of its groups is pushed.
        per_device: Create one bundle per device, so that a worker may have several.

    Returns:
        The slots of each role in rank order.

    Raises:
        PlacementInfeasibleError: The jobs never fit; raised at once.
        PlacementTimeoutError: The deadline has passed, or roles of this run hold the missing
            resources, which no one else would free.
    """
    silent: set[str] = set()
    """Nodes that did not grant their bundles and whose raylet does not answer."""
    tell_at_s = _TELL_S[0]
    num_own = 0
    """Checks in a row that found this run itself in the way. A single one may still see a group
    that is being removed.
    """
    for attempt in itertools.count():
        seen = await bounded(cluster_state.snapshot)
        snapshot = ClusterSnapshot(
            nodes=tuple(node for node in seen.nodes if node.node_id not in silent)
        )
        outcome = await run_in_executor(plan_jobs, snapshot, jobs)
        if isinstance(outcome, Plan):
            slots, refused = await _request(outcome, jobs, prefix, deadline, resources, per_device)
            if not refused:
                return slots
            silent = await bounded(_silent_nodes, silent | refused)
        else:
            await run_in_executor(require_feasible, snapshot, jobs, ())
        own = not isinstance(outcome, Plan) and await bounded(
            is_held_by_run, prefix, snapshot, jobs
        )
        num_own = num_own + 1 if own else 0
        is_over = num_own == _LOOKS or deadline.passed
        if is_over or deadline.elapsed_s > tell_at_s:
            error = busy(jobs, snapshot, await bounded(describe_holders, prefix, jobs), deadline)
            if is_over:
                raise error
            tell_at_s = deadline.elapsed_s + _TELL_S[1]
            log.warning("still waiting: %s", error.state)
        mean_s = min(_PAUSE_S[0] * 2 ** min(attempt, 10), _PAUSE_S[1])
        await asyncio.sleep(min(mean_s * (0.5 + random.random()), max(deadline.remaining_s, 0.0)))
    raise AssertionError("unreachable")


async def _request(
    plan: Plan,
    jobs: Sequence[Job],
    prefix: str,
    deadline: Deadline,
    resources: Mapping[str, contextlib.AsyncExitStack],
    per_device: bool,
) -> tuple[dict[str, list[BundleSlot]], set[str]]:
    """Create the groups of a plan.

    Returns:
        Their slots; or, after removal of all groups, the nodes that did not grant theirs.
    """
    requests: list[_GroupRequest] = []

    def ask() -> None:
        for role in plan.roles:
            for planned in role.instances:
                instance = _by_device(planned, role.accelerator) if per_device else planned
                asked_at = time.monotonic()
                requests.append(
                    _GroupRequest(role, instance, _create(role, instance, prefix), asked_at)
                )

    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(_remove, requests)
        asking = asyncio.ensure_future(bounded(ask))
        try:
            await asyncio.shield(asking)
        except asyncio.CancelledError:
            await asking  # otherwise groups that it requests later would remain
            raise
        waiting = await _await_created(requests, deadline)
        if waiting:
            return {}, {
                bundle.node_id for request in waiting for bundle in request.instance.bundles
            }
        undo.pop_all()
    strategies = {job.role: job.spec(0).ray_placement_strategy for job in jobs}
    slots: dict[str, list[BundleSlot]] = {}
    for role in plan.roles:
        own = [request for request in requests if request.role is role]
        resources[role.role].push_async_callback(_remove, own)
        slots[role.role] = [
            slot for request in own for slot in _slots(request, strategies[role.role] == "deferred")
        ]
    return slots, set()


def _by_device(instance: PlannedInstance, accelerator: str) -> PlannedInstance:
    """Split each bundle of the instance into one per device."""
    bundles = []
    for bundle in instance.bundles:
        parts = max(1, int(bundle.resources.get(accelerator, 0.0)))
        share = {name: amount / parts for name, amount in bundle.resources.items()}
        bundles += [msgspec.structs.replace(bundle, resources=share)] * parts
    return msgspec.structs.replace(instance, bundles=tuple(bundles))


def _create(role: PlannedRole, instance: PlannedInstance, prefix: str) -> PlacementGroup:
    name = (
        f"{prefix}/{role.role}"
        if len(role.instances) == 1
        else f"{prefix}/{role.role}/{instance.index}"
    )
    pinned = [{cluster_state.NODE_ID_LABEL: bundle.node_id} for bundle in instance.bundles]
    bundles = [bundle.resources for bundle in instance.bundles]
    group: PlacementGroup = create_placement_group(
        bundles, strategy="PACK", name=name, bundle_label_selector=pinned
    )
    return group


async def _await_created(
    requests: Sequence[_GroupRequest], deadline: Deadline
) -> list[_GroupRequest]:
    """Wait until all groups are created; return those that are not once waiting is pointless.

    If the head has found no room, others have taken the resources. Planning again is then faster
    than the head's next attempt, which may be a second away.

    The table is polled for all groups at once instead of group.ready(): many waiting ready() calls
    have deadlocked (ray#62086).
    """
    waiting, since, pause_s = list(requests), time.monotonic(), _POLL_S[0]
    while True:
        progress = await bounded(cluster_state.group_progress, [request.id for request in waiting])
        left = [
            request for request in waiting if progress[request.id].phase is not GroupPhase.CREATED
        ]
        if len(left) < len(waiting):
            waiting, since, pause_s = left, time.monotonic(), _POLL_S[0]
        in_flight = any(each.phase is GroupPhase.IN_FLIGHT for each in progress.values())
        if not left or not in_flight or deadline.passed or time.monotonic() - since > _STALLED_S:
            return left
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S[1])


def _slots(request: _GroupRequest, deferred: bool) -> list[BundleSlot]:
    kind, bundles = request.role.accelerator, request.instance.bundles
    sizes = tuple((bundle.node, int(bundle.resources.get(kind, 0))) for bundle in bundles)
    return [
        BundleSlot(
            node_id=worker.node_id,
            node=worker.node,
            num_devices=worker.num_devices,
            accelerator=kind if worker.num_devices else "",
            group=request.group,
            bundle_index=worker.bundle,
            resources={
                name: amount
                for name, amount in bundles[worker.bundle].resources.items()
                if not (deferred and name == kind)
            },
            deferred=deferred,
            bundles=sizes,
        )
        for worker in request.instance.workers
    ]


async def devices_of(slot: BundleSlot) -> list[Granted]:
    """Read the devices granted to each bundle of a deferred instance.

    A bundle's devices are fixed on creation, but Ray reports them only to a task that takes them;
    these tasks take them for a moment.

    Raises:
        TransportLostError: The tasks failed.
    """
    asked = []
    for index, (_, num_devices) in enumerate(slot.bundles):
        options: dict[str, Any] = {"num_gpus": num_devices} if slot.accelerator == "GPU" else {}
        if not options and num_devices:
            options = {"resources": {slot.accelerator: num_devices}}
        strategy = PlacementGroupSchedulingStrategy(slot.group, index)
        task = ray.remote(num_cpus=0, max_retries=0)(granted_here).options(
            scheduling_strategy=strategy, **options
        )
        asked.append(task.remote())
    try:
        granted: list[Granted] = await answered(asyncio.gather(*asked))
    except ray.exceptions.RayError as error:
        raise TransportLostError(
            "Ray did not report the devices that a placement group was granted: "
            f"{str(error).rstrip('.')}"
        ) from error
    return granted


async def _remove(requests: Sequence[_GroupRequest]) -> None:
    await _removed(_remove_in_order, requests, _REMOVE_S + 0.01 * len(requests))


async def remove_created(group: PlacementGroup) -> None:
    """Remove a group that was created, and may have been removed since."""
    await _removed(remove_placement_group, group, _REMOVE_S)


async def _removed(remove: Callable[[Any], None], groups: Any, limit_s: float) -> None:
    if not ray.is_initialized():
        return  # the script has shut Ray down, which removes its groups
    with contextlib.suppress(TimeoutError, ClusterLostError):
        await bounded(remove, groups, limit_s=limit_s)


def _remove_in_order(requests: Sequence[_GroupRequest]) -> None:
    """Remove waiting groups before created ones, and none while the head is trying to place it.

    Removing a group during an attempt leaks a bundle on a node forever (Ray 2.60 releases committed
    bundles, but not prepared ones). Between two attempts the head does not touch a waiting group,
    and publishes when the next one begins. Removing created groups first would make room for the
    waiting ones.
    """
    left = {request.id: request for request in requests}
    until = time.monotonic() + _SETTLE_S
    while left:
        progress = cluster_state.group_progress(left)
        unsettled = [
            id_ for id_ in left if progress[id_].phase in (GroupPhase.WAITING, GroupPhase.IN_FLIGHT)
        ]
        if unsettled and time.monotonic() < until:
            removed = [
                id_ for id_ in unsettled if _remove_between_attempts(left[id_], progress[id_])
            ]
            for id_ in removed:
                del left[id_]
            if not removed:
                time.sleep(_POLL_S[0])
            continue
        for id_ in unsettled or list(left):
            remove_placement_group(left.pop(id_).group)


def _remove_between_attempts(request: _GroupRequest, progress: GroupProgress) -> bool:
    # Slightly longer than by the head's clock, so the retry is never nearer than computed.
    since_s = time.monotonic() - request.asked_at
    if (
        progress.phase is not GroupPhase.WAITING
        or not progress.tried_s < since_s < progress.retry_s - _RETRY_NEAR_S
    ):
        return False
    remove_placement_group(request.group)
    return True


def _silent_nodes(node_ids: set[str]) -> set[str]:
    """Nodes whose raylet does not answer, although the head may still count them as alive."""
    with ThreadPoolExecutor(16) as pool:
        losses = dict(zip(node_ids, pool.map(cluster_state.loss_of_node, node_ids), strict=True))
    return {node_id for node_id, loss in losses.items() if loss is not None}


def get_placement_group_master_ip_and_port(
    placement_group: PlacementGroup, bundle_index: int = 0
) -> tuple[str, int]:
    """Find an address and a free port on the node of a bundle, for scripts with their own server.

    The port lies below the ephemeral range and was free. Its lease ends on return, because the
    process that binds the port is the script's own; start it at once. Workers of a Job have
    ``engine_ports``, which stay leased.

    Args:
        placement_group: A created placement group.
        bundle_index: Bundle in which rank 0 will run.

    Returns:
        Address of the node and the port.

    Raises:
        IndexError: The group has no such bundle.
        TimeoutError: The group is not placed, or its node does not reply within 60 s.
    """
    if not 0 <= bundle_index < placement_group.bundle_count:
        raise IndexError(
            f"bundle_index is {bundle_index}; the placement group has "
            f"{placement_group.bundle_count} bundles"
        )
    strategy = PlacementGroupSchedulingStrategy(
        placement_group, placement_group_bundle_index=bundle_index
    )
    reference = (
        ray.remote(num_cpus=0, max_retries=0)(_address_and_port)
        .options(scheduling_strategy=strategy)
        .remote()
    )
    try:
        address, port = ray.get(reference, timeout=60.0)
    except ray.exceptions.GetTimeoutError as error:
        ray.cancel(reference, force=True)
        table = placement_group_table(placement_group)
        name = table["name"] or placement_group.id.hex()
        raise TimeoutError(
            f"bundle {bundle_index} of placement group {name} reported no address within 60 s; the "
            f"group is {table['state']}. "
            "Wait for placement_group.ready() first, or request fewer resources."
        ) from error
    return str(address), int(port)


def _address_and_port() -> tuple[str, int]:
    from helmsman._process.ports import PortLeases

    leases = PortLeases()
    try:
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, leases.lease(1)[0]
    finally:
        leases.close()


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
