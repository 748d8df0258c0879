"""Resource amounts by Ray's names, and snapshots of a cluster's total and free resources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from helmsman.api.plan import Node
from helmsman.api.platforms import PLATFORMS

Resources = dict[str, float]
"""Amounts by Ray's names ('CPU', 'GPU', 'NPU', 'memory' in bytes, custom resources)."""

ACCELERATORS = tuple(
    dict.fromkeys(info.ray_resource for info in PLATFORMS.values() if info.visibility_env_var)
)
"""Ray's names of the accelerators that SchedulingSpec.gpu counts."""

_FIELDS = {**dict.fromkeys(ACCELERATORS, "gpu"), "CPU": "cpu", "memory": "mem"}


def total_of(parts: Iterable[Mapping[str, float]]) -> Resources:
    total: Resources = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def missing_of(wanted: Mapping[str, float], available: Mapping[str, float]) -> Resources:
    short = {name: amount - available.get(name, 0.0) for name, amount in wanted.items()}
    return {name: by for name, by in short.items() if by > 1e-6}


def show(resources: Mapping[str, float]) -> str:
    """Format resources as text: '8 GPU, 64 CPU, 100 GB memory'."""
    order = sorted(resources, key=lambda name: (name not in ACCELERATORS, name == "memory"))
    return ", ".join(
        f"{_digits(resources[name] / 1e9)} GB memory"
        if name == "memory"
        else f"{resources[name]:.10g} {name}"
        for name in order
    )


def _digits(gigabytes: float) -> str:
    return f"{gigabytes:.4g}" if gigabytes < 1000 else f"{gigabytes:.0f}"


def field_of(resource: str) -> str:
    return f"SchedulingSpec.{_FIELDS.get(resource, 'resources')}"


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    node_id: str
    address: str
    hostname: str = ""
    total: Resources
    available: Resources
    labels: dict[str, str] = {}
    free_devices: tuple[str, ...] | None = None
    """Ids of the node's free accelerators in order; None if unknown."""


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All live nodes, ordered so that nodes close to each other are adjacent."""

    nodes: tuple[NodeState, ...]
    can_grow: bool = True
    shared: frozenset[str] = frozenset()
    """Resources that workers share: a node needs the maximum of its workers' requests, not the sum.
    """


def as_node(state: NodeState) -> Node:
    kind = next((name for name in ACCELERATORS if state.total.get(name)), "")
    return Node(
        node_id=state.node_id,
        address=state.address,
        hostname=state.hostname,
        accelerator=kind,
        num_devices=int(state.total.get(kind, 0.0)),
        num_free_devices=int(state.available.get(kind, 0.0) + 1e-6),
        num_cpus=state.total.get("CPU", 0.0),
        num_free_cpus=state.available.get("CPU", 0.0),
    )
