"""A node's supervisor as a program, with a file of its plan and the folder of a fake cluster."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
from pathlib import Path

from helmsman._cluster.async_utils import status_printer, stop_signals
from helmsman._cluster.head import Head
from helmsman._cluster.joining_node import JoiningNode
from helmsman._cluster.node_plan import NodePlan
from helmsman._cluster.ray_process import NodeSeen, NodeView
from helmsman.api.errors import BootstrapError
from tests.cluster.fake_ray import behaviour


class Roll(NodeView):
    """Lists the nodes whose fake Ray has listed itself, also after its death, like Ray's head."""

    def __init__(self, cluster: Path) -> None:
        self._cluster = cluster

    def nodes(self, run_id: str) -> dict[int, NodeSeen]:
        seen = {}
        for path in self._cluster.glob("*/listed"):
            row, rank = json.loads(path.read_text()), path.parent.name
            if row["run"] == run_id:
                seen[int(rank)] = NodeSeen(
                    rank, row["address"], row["resources"], "twice" in behaviour(str(path.parent))
                )
        return seen

    def drain(self, node_id: str, reason: str, limit_s: float) -> None:
        """End the Ray of a node unless it is busy."""
        node = self._cluster / node_id
        if "busy" not in behaviour(str(node)):
            os.kill(json.loads((node / "started").read_text())["pid"], signal.SIGTERM)


async def live(plan: NodePlan, cluster: Path) -> int:
    stop, report = stop_signals(), status_printer(plan.identity.rank)
    try:
        if plan.identity.rank:
            return await JoiningNode(plan, report, stop).run()
        return await Head(plan, report, stop, lambda address, environ: Roll(cluster)).run()
    except BootstrapError as error:
        report(f"{error.exit_code.name}: {error}")
        return error.exit_code


def main() -> int:
    """Run the supervisor of the plan."""
    return asyncio.run(live(pickle.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(main())
