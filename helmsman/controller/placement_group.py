"""Ray placement groups: what a job asks for, whether the cluster could ever give it, and waiting for it under one deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.placement_group import placement_group as create_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from helmsman.api import errors
from helmsman.api.platform_kinds import PLATFORMS
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller.deadline import Deadline
from helmsman.controller.embedded_ray import bounded

Resources = dict[str, float]

_POLL_S = 0.02
_REMOVE_S = 2.0
_TINY_CPU = 0.001
"""A bundle may not be empty: what a worker reserves that asks for nothing."""


class GroupRequest(msgspec.Struct, frozen=True):
    """A placement group to ask for, and the replicas that go into it."""

    name: str
    bundles: list[Resources]
    strategy: str
    replicas: list[int]
    """Replica of each bundle for a shared group; the one replica of the group otherwise."""
    labels: list[dict[str, str]]


class Slot(msgspec.Struct, frozen=True):
    """Where a replica goes."""

    group: Any
    bundle_index: int
    node_id: str


def accelerator_resource(nodes: Sequence[dict[str, Any]]) -> str:
    """Name under which this cluster counts its accelerators; GPU where it has none."""
    names = [info.ray_resource for info in PLATFORMS.values() if info.visibility_env_var]
    return next((name for name in names if any(node["Resources"].get(name) for node in nodes)), names[0])


def bundle_of(spec: SchedulingSpec, accelerator: str) -> Resources:
    """What Ray has to reserve for one worker. Memory in bytes."""
    wanted = {"CPU": spec.cpu, accelerator: spec.gpu, "memory": spec.mem * 1e9, **spec.resources}
    if spec.accelerator_type:
        wanted[f"accelerator_type:{spec.accelerator_type}"] = _TINY_CPU
    return {name: amount for name, amount in wanted.items() if amount} or {"CPU": _TINY_CPU}


def plan_groups(job: Job, accelerator: str, per_node: int, prefix: str) -> list[GroupRequest]:
    """The groups of a job: one for all workers (shared), one for each (separate), or one for each with its devices split over
    nodes (deferred)."""
    strategy = job.spec(0).ray_placement_strategy
    specs = [job.spec(index) for index in range(job.replicas)]
    if strategy == "shared":
        bundles = [bundle_of(spec, accelerator) for spec in specs]
        labels = [dict(spec.node_labels) for spec in specs]
        return [GroupRequest(f"{prefix}/{job.role}", bundles, "PACK", list(range(job.replicas)), labels)]
    requests = []
    for index, spec in enumerate(specs):
        bundles, kind = [bundle_of(spec, accelerator)], "STRICT_PACK"
        if strategy == "deferred" and per_node and spec.gpu > per_node:
            whole, rest = divmod(int(spec.gpu), per_node)
            parts = [per_node] * whole + ([rest] if rest else [])
            first = bundle_of(msgspec.structs.replace(spec, gpu=parts[0]), accelerator)
            bundles, kind = [first, *({accelerator: float(part), "CPU": _TINY_CPU} for part in parts[1:])], "PACK"
        labels = [dict(spec.node_labels)] * len(bundles)
        requests.append(GroupRequest(f"{prefix}/{job.role}/{index}", bundles, kind, [index], labels))
    return requests


def require_feasible(job: Job, requests: Sequence[GroupRequest], nodes: Sequence[dict[str, Any]]) -> None:
    """Raise PlacementInfeasibleError when the cluster, even empty, could not hold the groups."""
    for request in requests:
        for bundle in request.bundles:
            missing, best = min((_shortfall(bundle, node["Resources"]), _node_name(node)) for node in nodes)
            if missing:
                total = next(node["Resources"] for node in nodes if _node_name(node) == best)
                raise errors.PlacementInfeasibleError(
                    role=job.role,
                    requested=f"a worker with {_show(bundle)}",
                    observed=f"at most {_show({name: total.get(name, 0.0) for name in bundle})} on the best-fitting of "
                    f"{len(nodes)} nodes, {best}",
                    shortfall=_show(dict(missing)),
                    setting=_setting(missing[0][0]),
                )
    wanted = _sum([bundle for request in requests for bundle in request.bundles])
    cluster = _sum([node["Resources"] for node in nodes])
    missing = _shortfall(wanted, cluster)
    if missing:
        raise errors.PlacementInfeasibleError(
            role=job.role,
            requested=f"{_show(wanted)} for {job.replicas} workers together",
            observed=f"{_show({name: cluster.get(name, 0.0) for name in wanted})} on {len(nodes)} nodes together",
            shortfall=_show(dict(missing)),
            setting=f"Job.replicas or {_setting(missing[0][0])}",
        )


def _shortfall(wanted: Resources, available: Resources) -> list[tuple[str, float]]:
    short = [(name, amount - available.get(name, 0.0)) for name, amount in wanted.items()]
    return sorted(((name, by) for name, by in short if by > 1e-6), key=lambda part: -part[1])


def _sum(parts: Sequence[Resources]) -> Resources:
    total: Resources = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _node_name(node: dict[str, Any]) -> str:
    return str(node["NodeManagerAddress"])


def _setting(resource: str) -> str:
    fields = {"CPU": "cpu", "memory": "mem", **{info.ray_resource: "gpu" for info in PLATFORMS.values() if info.name != "cpu"}}
    return f"SchedulingSpec.{fields.get(resource, 'resources')}"


def _show(resources: Resources) -> str:
    return ", ".join(f"{amount / 1e9:g} GB memory" if n == "memory" else f"{amount:g} {n}" for n, amount in resources.items())


async def reserve(
    job: Job, requests: Sequence[GroupRequest], deadline: Deadline, resources: contextlib.AsyncExitStack
) -> list[Slot]:
    """Ask for all groups together and wait for them; returns each replica's slot, ranks sorted by node.

    Raises: PlacementTimeoutError, with all groups removed by the unwinding of ``resources``; at once, when roles of this very
    run hold what is missing, since nobody else would free it.
    """
    groups: list[PlacementGroup] = []
    if await asyncio.to_thread(_own_roles_are_in_the_way, requests):
        raise await asyncio.to_thread(_busy, job, requests, groups, deadline)
    for request in requests:
        selector = request.labels if any(request.labels) else None
        group = create_placement_group(
            request.bundles, strategy=request.strategy, name=request.name, bundle_label_selector=selector
        )
        groups.append(group)
        resources.push_async_callback(_remove, group)
    # The table and not group.ready(): many waiting ready() calls have deadlocked (ray#62086).
    while True:
        tables = [await asyncio.to_thread(placement_group_table, group) for group in groups]
        if all(table["state"] == "CREATED" for table in tables):
            break
        if deadline.passed:
            raise await asyncio.to_thread(_busy, job, requests, groups, deadline)
        await asyncio.sleep(_POLL_S)
    return _slots(job, requests, groups, tables)


async def _remove(group: PlacementGroup) -> None:
    with contextlib.suppress(TimeoutError):
        await bounded(remove_placement_group, group, limit_s=_REMOVE_S)


def _slots(
    job: Job, requests: Sequence[GroupRequest], groups: Sequence[PlacementGroup], tables: Sequence[dict[str, Any]]
) -> list[Slot]:
    slots: dict[int, Slot] = {}
    for request, group, table in zip(requests, groups, tables, strict=True):
        nodes: dict[int, str] = table["bundles_to_node_id"]
        if len(request.replicas) == 1:
            slots[request.replicas[0]] = Slot(group, 0, nodes[0])
            continue
        # PACK promises no order of bundles over nodes; ranks of one node shall be neighbours. Only like bundles may be
        # exchanged.
        order = sorted(nodes, key=lambda bundle: (nodes[bundle], bundle)) if len(job.tasks) == 1 else sorted(nodes)
        for replica, bundle in zip(request.replicas, order, strict=True):
            slots[replica] = Slot(group, bundle, nodes[bundle])
    return [slots[replica] for replica in range(job.replicas)]


def _own_roles_are_in_the_way(requests: Sequence[GroupRequest]) -> bool:
    run = _run_of(requests[0].name)
    held = [
        bundle
        for table in placement_group_table().values()
        if table["state"] == "CREATED" and _run_of(table["name"]) == run
        for bundle in table["bundles"].values()
    ]
    wanted = _sum([bundle for request in requests for bundle in request.bundles])
    total: Resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return any(amount + _sum(held).get(name, 0.0) > total.get(name, 0.0) + 1e-6 for name, amount in wanted.items())


def _run_of(group_name: str) -> str:
    """'helmsman/RUN', of the name of one of our groups."""
    return "/".join(group_name.split("/")[:2])


def _holder(group_name: str, run: str) -> str:
    role = group_name.removeprefix(f"{run}/")
    return group_name if role == group_name else f"{role} of this run itself, which delete_workers frees"


def _busy(
    job: Job, requests: Sequence[GroupRequest], groups: Sequence[PlacementGroup], deadline: Deadline
) -> errors.PlacementTimeoutError:
    ours = {group.id.hex() for group in groups}
    run = _run_of(requests[0].name)
    holders = [
        f"{_holder(table['name'], run) or group_id[:12]} ({_show(_sum(list(table['bundles'].values())))})"
        for group_id, table in placement_group_table().items()
        if table["state"] == "CREATED" and group_id not in ours
    ]
    wanted = _sum([bundle for request in requests for bundle in request.bundles])
    free: Resources = ray.available_resources()  # type: ignore[no-untyped-call]
    return errors.PlacementTimeoutError(
        role=job.role,
        requested=_show(wanted),
        free=_show({name: free.get(name, 0.0) for name in wanted}),
        holders=", ".join(holders) or "tasks and actors outside placement groups",
        elapsed_s=deadline.elapsed_s,
        limit_s=deadline.limit_s,
    )


def get_placement_group_master_ip_and_port(placement_group: PlacementGroup, bundle_index: int = 0) -> tuple[str, int]:
    """Address and a leased port of the node that holds a bundle, for scripts that bring their own server.

    The port lies below the ephemeral range and nobody listened on it. The lease ends when this returns, since the worker that
    will bind the port is the script's own: start it at once. Workers of a Job have ``engine_ports``, which stay leased.

    Args:
        placement_group: a created placement group.
        bundle_index: the bundle in which rank 0 will run.
    Raises: IndexError (no such bundle), TimeoutError (the group is not placed, or its node does not answer within 60 s).
    """
    if not 0 <= bundle_index < placement_group.bundle_count:
        raise IndexError(f"bundle_index is {bundle_index}; the placement group has {placement_group.bundle_count} bundles")
    strategy = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundle_index)
    reference = ray.remote(num_cpus=0, max_retries=0)(_address_and_port).options(scheduling_strategy=strategy).remote()
    try:
        address, port = ray.get(reference, timeout=60.0)
    except ray.exceptions.GetTimeoutError as error:
        ray.cancel(reference, force=True)
        table = placement_group_table(placement_group)
        name = table["name"] or placement_group.id.hex()
        raise TimeoutError(
            f"bundle {bundle_index} of placement group {name} gave no address within 60 s; the group is {table['state']}. "
            "Wait for placement_group.ready() first, or ask for less."
        ) from error
    return str(address), int(port)


def _address_and_port() -> tuple[str, int]:
    from helmsman.rpc_server.ports import PortLeases

    leases = PortLeases()
    try:
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, leases.lease(1)[0]
    finally:
        leases.close()


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Schedule on this node and on no other."""
    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
