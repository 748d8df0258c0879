"""The total and free resources of a cluster at one moment."""

from __future__ import annotations

import msgspec

from helmsman.api.plan import Node
from helmsman.controller._placement.resources import ACCELERATORS, Resources


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node_id: str
    address: str
    hostname: str = ""
    total: Resources
    available: Resources
    labels: dict[str, str] = {}
    free_devices: tuple[str, ...] | None = None
    """Ids of its free accelerators in order; None when unknown."""


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All live nodes, ordered so that nodes close to each other are neighbours."""

    nodes: tuple[NodeState, ...]
    can_grow: bool = True
    """Whether nodes could be added."""
    shared: frozenset[str] = frozenset()
    """Resources that workers share: a node needs the largest request of its workers, and not the sum."""


def as_node(state: NodeState) -> Node:
    """Return the node in the form of the public API."""
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
