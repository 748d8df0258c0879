"""Plans of nodes, made by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from helmsman.controller._bootstrap.node_plan import NodePlan
from helmsman.controller._bootstrap.settings import NODE_DEFAULTS, cluster_defaults, variables
from helmsman.controller._node.launchers import NodeIdentity

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "helmsman": "0.1.0"}


def make_plan(folder: Path, *, rank: int = 0, count: int = 1, head: str = "127.0.0.1", **changes: Any) -> NodePlan:
    """What a node of this machine is to do."""
    fields: dict[str, Any] = {
        "run_id": f"run-of-{rank}",
        "identity": NodeIdentity(launcher="flags", rank=rank, count=count, head=head),
        "command": [sys.executable, "-c", "pass"],
        "address": "127.0.0.1",
        "port": 6379,
        "control_port": 6380 if count > 1 else 0,
        "secret": "a token of this test",
        "versions": VERSIONS,
        "num_devices": 0,
        "device_kind": "GPU",
        "resources": {"CPU": 2.0},
        "store_bytes": 1 << 28,
        "cluster_settings": variables(cluster_defaults(count), {}, {}),
        "node_settings": variables(NODE_DEFAULTS, {}, {}),
        "timeout_s": 20.0,
        "grace_s": 2.0,
        "folder": folder,
    }
    return NodePlan(**{**fields, **changes})
