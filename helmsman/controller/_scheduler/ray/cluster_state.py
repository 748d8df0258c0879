"""Reads Ray's tables of nodes, placement groups and actors, and selects the cluster to join.

Ray's public state API needs a dashboard, which an embedded cluster does not have. This module reads
the underlying tables, with one request to the head each, whatever the number of nodes or groups. No
other module reads them.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
import ray
from ray._private import services
from ray._private.state import state
from ray.core.generated import gcs_pb2

from helmsman._process.launchers import find_many_nodes
from helmsman.api.errors import AmbiguousAddressError, ClusterNotFoundError, ClusterNotUpError
from helmsman.api.plan import Plan
from helmsman.api.scheduler import Job, PreemptionNotice
from helmsman.controller._placement.admission import asked_for
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import (
    ACCELERATORS,
    ClusterSnapshot,
    NodeState,
    Resources,
    show,
    total_of,
)

_RAYLET_ANSWERS_S = 1.0
_SHOWN = 8
NODE_ID_LABEL = "ray.io/node-id"
"""Label by which Ray identifies a node."""
_GPU_DOMAIN = "ray.io/gpu-domain"
_tables: Any = gcs_pb2
_GroupState = _tables.PlacementGroupTableData
_ActorState = _tables.ActorTableData
_DERIVED = re.compile(r"^node:|^bundle_group_|_group_(\d+_)?[0-9a-f]{20,}$|^object_store_memory$")
"""Resources that Ray derives from others; no job requests them by name."""


class GroupRow(msgspec.Struct, frozen=True):
    """A placement group of any job in the cluster."""

    id: str
    name: str
    state: str
    """PENDING, PREPARED, CREATED, REMOVED or RESCHEDULING."""
    job_id: str
    bundles: list[tuple[str, Resources]]
    """(node id, resources) of each bundle, in order. Before placement the id is that of the
    requested node or ''.
    """


def alive_nodes() -> list[dict[str, Any]]:
    """Rows of ray.nodes() for live nodes, except nodes being drained."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    draining: Mapping[str, int] = state.get_draining_nodes()
    return [node for node in nodes if node["Alive"] and node["NodeID"] not in draining]


def draining_nodes() -> dict[str, PreemptionNotice]:
    """Preemption notices of nodes being drained, by node id and by address."""
    draining: Mapping[str, int] = state.get_draining_nodes()
    found: dict[str, PreemptionNotice] = {}
    for node in ray.nodes() if draining else ():  # type: ignore[no-untyped-call]
        if node["Alive"] and (deadline_ms := draining.get(node["NodeID"])) is not None:
            deadline_s = max(0.0, deadline_ms / 1e3 - time.time()) if deadline_ms else None
            address = node["NodeManagerAddress"]
            notice = PreemptionNotice(
                reason=f"its node {address} is being drained", deadline_s=deadline_s
            )
            found[node["NodeID"]] = found[address] = notice
    return found


def snapshot() -> ClusterSnapshot:
    """The cluster as the head sees it now, with neighbouring nodes next to each other.

    Node reports are up to 0.1 s old, but the table of placement groups is current. Therefore
    resources count as held as soon as a group holds them, or requests them on a given node.
    """
    reported: Mapping[str, Resources] = state.available_resources_per_node()  # type: ignore[no-untyped-call]
    in_groups: dict[str, list[Resources]] = {}
    for group in group_rows():
        for node_id, bundle in group.bundles:
            in_groups.setdefault(node_id, []).append(bundle)
    nodes = [
        NodeState(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            hostname=node["NodeManagerHostname"],
            total=_own(node["Resources"]),
            available=_available(
                node["Resources"],
                reported.get(node["NodeID"], {}),
                in_groups.get(node["NodeID"], []),
            ),
            labels=dict(node["Labels"]),
        )
        for node in alive_nodes()
    ]
    return ClusterSnapshot(nodes=tuple(sorted(nodes, key=_neighbourhood)))


def _available(
    total: Mapping[str, float], reported: Mapping[str, float], in_groups: Sequence[Resources]
) -> Resources:
    held = total_of(in_groups)
    return {
        name: max(0.0, min(reported.get(name, 0.0), amount - held.get(name, 0.0)))
        for name, amount in _own(total).items()
    }


def _own(resources: Mapping[str, float]) -> Resources:
    return {name: amount for name, amount in resources.items() if not _DERIVED.search(name)}


def _neighbourhood(node: NodeState) -> tuple[str, list[Any], str]:
    # re.split alternates text and numbers, so 'node-9' sorts before 'node-10'.
    parts = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", node.address)]
    return node.labels.get(_GPU_DOMAIN, ""), parts, node.node_id


def group_rows() -> list[GroupRow]:
    rows = map(
        _GroupState.FromString, state._connect_and_get_accessor().get_placement_group_table()
    )
    return [
        GroupRow(
            id=row.placement_group_id.hex(),
            name=row.name,
            state=_GroupState.PlacementGroupState.Name(row.state),
            job_id=row.creator_job_id.hex(),
            bundles=[
                (
                    bundle.node_id.hex() or dict(bundle.label_selector).get(NODE_ID_LABEL, ""),
                    dict(bundle.unit_resources),
                )
                for bundle in sorted(
                    row.bundles, key=lambda bundle: int(bundle.bundle_id.bundle_index)
                )
            ],
        )
        for row in rows
        if row.state != _GroupState.REMOVED
    ]


class GroupPhase(Enum):
    """Progress of a placement group in the head."""

    WAITING = "waiting"
    """The last attempt found no room; the group holds nothing until the next attempt."""
    IN_FLIGHT = "in flight"
    """The head has not tried yet, or is asking its nodes."""
    CREATED = "created"
    GONE = "gone"
    """Removed or unknown."""


class GroupProgress(msgspec.Struct, frozen=True):
    """Progress of a placement group; times in seconds since the head received the request."""

    phase: GroupPhase
    tried_s: float = 0.0
    """Start of the last attempt."""
    retry_s: float = 0.0
    """Earliest start of the next attempt."""


def group_progress(ids: Iterable[str]) -> dict[str, GroupProgress]:
    found = dict.fromkeys(ids, GroupProgress(GroupPhase.GONE))
    for data in state._connect_and_get_accessor().get_placement_group_table():
        row = _GroupState.FromString(data)
        if (group_id := row.placement_group_id.hex()) in found:
            found[group_id] = _progress(row)
    return found


_FIRST_RETRY_MS, _LAST_RETRY_MS, _RETRY_GROWTH = 100.0, 1000.0, 1.5
"""Ray's default pauses after an attempt that found no room (gcs_create_placement_group_retry_*)."""
_ASKED_S = 0.3
"""Limit within which a node replies to the head, unless its machine is stalled."""


def _progress(row: Any) -> GroupProgress:
    if row.state == _GroupState.CREATED:
        return GroupProgress(GroupPhase.CREATED)
    if row.state == _GroupState.REMOVED:
        return GroupProgress(GroupPhase.GONE)
    stage, stats = _tables.PlacementGroupStats, row.stats
    if stats.scheduling_state == stage.INFEASIBLE:
        return GroupProgress(GroupPhase.WAITING, retry_s=float("inf"))
    tried_s = (stats.scheduling_started_time_ns - stats.creation_request_received_ns) / 1e9
    retry_s = tried_s + stats.highest_retry_delay_ms / 1e3
    if row.state != _GroupState.PENDING or stats.scheduling_state != stage.NO_RESOURCES:
        return GroupProgress(GroupPhase.IN_FLIGHT, tried_s, retry_s)
    # The state remains NO_RESOURCES during the next attempt. The head lengthens the pause only when
    # that attempt has failed.
    pause_ms = int(stats.highest_retry_delay_ms)
    if pause_ms < _LAST_RETRY_MS and pause_ms == _pause_ms(stats.scheduling_attempt - 1):
        return GroupProgress(GroupPhase.IN_FLIGHT, tried_s, retry_s)
    told_apart = pause_ms < _LAST_RETRY_MS and pause_ms == _pause_ms(stats.scheduling_attempt)
    return GroupProgress(GroupPhase.WAITING, tried_s if told_apart else tried_s + _ASKED_S, retry_s)


def _pause_ms(attempts: int) -> int:
    """Ray's pause after this many failed attempts; 0 before the first."""
    return (
        int(min(_LAST_RETRY_MS, _FIRST_RETRY_MS * _RETRY_GROWTH ** (attempts - 1)))
        if attempts
        else 0
    )


def actor_state(actor_id: str) -> str:
    """State of an actor, such as PENDING_CREATION; '' if Ray does not list it."""
    data = state._connect_and_get_accessor().get_actor_info(ray.ActorID.from_hex(actor_id))
    return _ActorState.ActorState.Name(_ActorState.FromString(data).state) if data else ""


def loss_of_node(node_id: str) -> str | None:
    """Reason why a node counts as lost, as part of a sentence; None while its raylet runs.

    The head detects a raylet's death within seconds, and a vanished host within the limit of its
    health checks. Connecting to the raylet's port detects both at once.
    """
    row = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)  # type: ignore[no-untyped-call]
    if row is None or not row["Alive"]:
        return "Ray has declared the node dead"
    try:
        with socket.create_connection(
            (row["NodeManagerAddress"], row["NodeManagerPort"]), _RAYLET_ANSWERS_S
        ):
            return None
    except OSError as error:
        return f"the node's raylet does not answer ({error})"


# --- holders --------------------------------------------------------------------------------------


def is_held_by_run(prefix: str, snapshot: ClusterSnapshot, jobs: Sequence[Job]) -> bool:
    """Return whether groups named with ``prefix`` block the jobs even if others held nothing."""
    held: dict[str, list[Resources]] = {}
    for group in group_rows():
        if group.name.startswith(f"{prefix}/") and group.state == "CREATED":
            for node_id, bundle in group.bundles:
                held.setdefault(node_id, []).append(bundle)
    nodes = [
        msgspec.structs.replace(
            node, available=_available(node.total, node.total, held.get(node.node_id, []))
        )
        for node in snapshot.nodes
    ]
    return bool(held) and not isinstance(plan_jobs(ClusterSnapshot(nodes=tuple(nodes)), jobs), Plan)


def describe_holders(prefix: str, jobs: Sequence[Job]) -> str:
    """Describe the largest holders of the resources that the jobs request.

    Groups named with ``prefix`` are described as this run's own.
    """
    wanted = asked_for(jobs).keys()
    drivers = {
        job["JobID"]: f"job {job['JobID']} (pid {job['DriverPid']} on {job['DriverIPAddress']}: "
        f"{job['Entrypoint'][:120]})"
        for job in state.job_table()  # type: ignore[no-untyped-call]
    }
    found: list[tuple[float, str]] = []
    for group in group_rows():
        part = _part(total_of([bundle for _, bundle in group.bundles]), wanted)
        if group.state == "CREATED" and part:
            own = group.name.startswith(f"{prefix}/")
            name = (
                group.name.removeprefix(f"{prefix}/")
                if own
                else group.name or f"placement group {group.id[:12]}"
            )
            whose = (
                "this run itself, freed by delete_workers"
                if own
                else drivers.get(group.job_id, f"job {group.job_id}")
            )
            found.append((_weight(part), f"{name} of {whose} ({show(part)})"))
    for data in state._connect_and_get_accessor().get_actor_table(None, "ALIVE"):
        row = _ActorState.FromString(data)
        part = _part(row.required_resources, wanted)
        if part and not row.placement_group_id.strip(b"\xff"):
            whose = drivers.get(row.job_id.hex(), f"job {row.job_id.hex()}")
            found.append(
                (
                    _weight(part),
                    f"actor {row.name or row.class_name}, pid {row.pid}, of {whose} ({show(part)})",
                )
            )
    found.sort(key=lambda holder: -holder[0])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        "; ".join(text for _, text in found[:_SHOWN]) + more
        or "tasks, or groups and actors that are ending"
    )


def _part(resources: Mapping[str, float], wanted: Collection[str]) -> Resources:
    # An otherwise empty bundle holds a trace of CPU, which is too small to block a job.
    return {name: amount for name, amount in resources.items() if name in wanted and amount >= 0.01}


def _weight(resources: Resources) -> float:
    """Sort key of holders, dominated by accelerators."""
    units = {**dict.fromkeys(ACCELERATORS, 1e3), "memory": 1e-9}
    return sum(amount * units.get(name, 1.0) for name, amount in resources.items())


log = logging.getLogger(__name__)

_ANSWER_S = 5.0


def choose_address(address: str | None) -> str | None:
    """Choose the address to connect to.

    Args:
        address: Address given by the script; RAY_ADDRESS when None, and 'local' without that.
            'auto' selects the only cluster on this machine.

    Returns:
        The address, or 'local' for an embedded cluster; None to use the cluster that this process
        is connected to.

    Raises:
        AmbiguousAddressError: Several clusters match, or the process is connected to another one.
        ClusterNotFoundError: No cluster answers at the address.
        ClusterNotUpError: A launcher has started the script on several nodes, and no cluster of
            them is given.
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    if wanted == "auto":
        wanted = _the_one_on_this_machine()
    if not ray.is_initialized():
        if wanted == "local":
            _require_one_node(is_chosen=bool(address or os.environ.get("RAY_ADDRESS")))
        require_answer(wanted)
        return wanted
    connected = ray.get_runtime_context().gcs_address
    if address is not None and wanted != connected:
        raise AmbiguousAddressError(
            asked=f"address={address!r}",
            candidates=[
                f"{connected}, to which this process is connected already",
                f"{wanted}, as requested",
            ],
            step="Leave the address out to use the connected cluster, or call ray.shutdown() first",
        )
    return None


def _require_one_node(*, is_chosen: bool) -> None:
    """Raise ClusterNotUpError if each of several nodes would start its own Ray and train alone.

    If the user has chosen 'local', only log a warning.
    """
    said = find_many_nodes(os.environ)
    if said is None:
        return
    facts = [fact.said_by for fact in (said.rank, said.count, said.head) if fact is not None]
    if is_chosen:
        log.warning(
            "Ray starts on this node only, as requested by address 'local', although the launcher "
            "started several nodes (%s)",
            ", ".join(facts),
        )
        return
    command = shlex.join(sys.orig_argv) or "python train.py"
    raise ClusterNotUpError(launcher=said.launcher, said=facts, command=f"helmsman up -- {command}")


def require_answer(address: str) -> None:
    """Raise ClusterNotFoundError within seconds if nothing listens at the address.

    Ray itself would retry for a minute.
    """
    host, _, port = address.rpartition(":")
    if address == "local" or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        raise ClusterNotFoundError(
            asked=address, reason=f"nothing answers there ({error})"
        ) from error


def _the_one_on_this_machine() -> str:
    found: list[str] = sorted(services._find_address_from_flag("--gcs-address"))
    if not found:
        raise ClusterNotFoundError(asked="auto", reason="no Ray runs on this machine")
    if len(found) > 1:
        raise AmbiguousAddressError(
            asked="address 'auto'",
            candidates=found,
            step="Give the address of one of them, as address= or in RAY_ADDRESS",
        )
    return found[0]
