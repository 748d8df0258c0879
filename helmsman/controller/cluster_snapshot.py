"""What a cluster has and what of it is free, at one moment."""

from __future__ import annotations

import msgspec

from helmsman.controller.resources import Resources


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node_id: str
    address: str
    hostname: str = ""
    total: Resources
    available: Resources
    labels: dict[str, str] = {}
    free_devices: tuple[str, ...] | None = None
    """Ids of its free accelerators, in order; None where that is not known."""


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes that live, in the order in which neighbours are neighbours."""

    nodes: tuple[NodeState, ...]
    can_grow: bool = True
    """Whether nodes could be added."""
