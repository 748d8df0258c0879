"""Which nodes Ray's head knows: asked of the head itself, without becoming a driver of its cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from helmsman.controller.bootstrap.node_plan import RANK_LABEL, RUN_LABEL

_ANSWER_S = 2.0


class NodeSeen(msgspec.Struct, frozen=True):
    """A living node of the run."""

    address: str
    resources: Mapping[str, float]
    is_twice: bool = False
    """Whether Ray still counts one of its rank that was killed before, for half a minute or so; work would be sent there."""


class SeesNodes(Protocol):
    """Asks a head for its nodes."""

    async def nodes(self, run_id: str) -> dict[int, NodeSeen]:
        """Living nodes of the run, by rank; those that answer within two seconds."""


class RayHead:
    """Ray's head.

    Its client is private in Ray; nothing else tells of nodes without a driver's connection, which takes a second and is the
    script's to make.
    """

    def __init__(self, address: str, environ: Mapping[str, str]) -> None:
        self._address, self._environ = address, environ
        self._client: Any = None

    async def nodes(self, run_id: str) -> dict[int, NodeSeen]:
        """Living nodes of the run, by rank; none while the head does not answer."""
        return await asyncio.to_thread(self._ask, run_id)

    def _ask(self, run_id: str) -> dict[int, NodeSeen]:
        os.environ.update({name: value for name, value in self._environ.items() if name.startswith("RAY_")})
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]
        from ray.exceptions import RaySystemError, RpcError

        try:
            self._client = self._client or GcsClient(address=self._address)
            rows = self._client.get_all_node_info(timeout=_ANSWER_S)
        except (RpcError, RaySystemError):
            return {}
        seen: dict[int, NodeSeen] = {}
        for row in rows.values():
            if row.state == GcsNodeInfo.ALIVE and row.labels.get(RUN_LABEL) == run_id:
                rank = int(row.labels[RANK_LABEL])
                seen[rank] = NodeSeen(row.node_manager_address, dict(row.resources_total), is_twice=rank in seen)
        return seen
