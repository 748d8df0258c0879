"""Which nodes Ray's head knows: asked of the head itself, without becoming a driver of its cluster."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from helmsman.controller._node.run_registry import RANK_LABEL, RUN_LABEL

_ANSWER_S = 2.0


class NodeSeen(msgspec.Struct, frozen=True):
    """A living node of the run."""

    node_id: str
    """Ray's."""
    address: str
    resources: Mapping[str, float]
    is_twice: bool = False
    """Whether Ray still counts one of its rank that was killed before, for half a minute or so; work would be sent there."""


class SeesNodes(Protocol):
    """Asks a head for its nodes."""

    async def nodes(self, run_id: str) -> dict[int, NodeSeen]:
        """Living nodes of the run, by rank; those that answer within two seconds."""

    async def drain(self, node_id: str, reason: str, limit_s: float) -> None:
        """Have the head send nothing more to a node, which has to be left within so many seconds. Raises: ConnectionError."""


class RayHead:
    """Ray's head.

    Its client is private in Ray; nothing else tells of nodes without a driver's connection, which takes a second and is the
    script's to make.
    """

    def __init__(self, address: str, environ: Mapping[str, str]) -> None:
        self._address = address
        self._client: Any = None
        # Ray reads them when it is imported, which is later.
        os.environ.update({name: value for name, value in environ.items() if name.startswith("RAY_")})

    async def nodes(self, run_id: str) -> dict[int, NodeSeen]:
        """Living nodes of the run, by rank; none while the head does not answer."""
        return await asyncio.to_thread(self._ask, run_id)

    async def drain(self, node_id: str, reason: str, limit_s: float) -> None:
        """See SeesNodes; as ``ray drain-node`` does it."""
        await asyncio.to_thread(self._drain, node_id, reason, limit_s)

    def _connected(self) -> Any:
        if self._client is None:
            from ray._raylet import GcsClient  # type: ignore[attr-defined]

            self._client = GcsClient(address=self._address)
        return self._client

    def _drain(self, node_id: str, reason: str, limit_s: float) -> None:
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]
        from ray.exceptions import RaySystemError, RpcError

        until_ms = int((time.time() + limit_s) * 1000)
        try:
            client = self._connected()
            accepted, why = client.drain_node(node_id, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, reason, until_ms)
        except (RpcError, RaySystemError) as error:
            raise ConnectionError(str(error)) from error
        if not accepted:
            raise ConnectionError(why)

    def _ask(self, run_id: str) -> dict[int, NodeSeen]:
        from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]
        from ray.exceptions import RaySystemError, RpcError

        try:
            rows = self._connected().get_all_node_info(timeout=_ANSWER_S)
        except (RpcError, RaySystemError):
            return {}
        seen: dict[int, NodeSeen] = {}
        for node_id, row in rows.items():
            if row.state == GcsNodeInfo.ALIVE and row.labels.get(RUN_LABEL) == run_id:
                rank = int(row.labels[RANK_LABEL])
                seen[rank] = NodeSeen(node_id.hex(), row.node_manager_address, dict(row.resources_total), is_twice=rank in seen)
        return seen
