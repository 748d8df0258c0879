"""Ranks of a vLLM instance on nodes other than its worker's.

vLLM starts only the ranks of its own node, so each other node has a process that starts its own. It
ends with the worker, and vLLM's processes end with it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from helmsman._base.interfaces import ipv4_interfaces
from helmsman.api.environment import INSTANCE_DEVICES_ENV_VAR
from helmsman.api.workers import InstanceNodes, NodeProcess
from helmsman.engines._vllm import internals

_KILL_EVERY_S = 0.5


def instance_nodes() -> list[tuple[str, int]]:
    """Return (address, number of devices) of each node of this worker's instance, its own first.

    Empty if the worker's job is not deferred.
    """
    return [
        (address, len(devices))
        for address, devices in json.loads(os.environ.get(INSTANCE_DEVICES_ENV_VAR, "[]"))
    ]


def node_arguments(nodes: Sequence[tuple[str, int]], num_ranks: int, port: int) -> dict[str, Any]:
    """Return the additional arguments of AsyncEngineArgs for an instance on these nodes.

    Args:
        nodes: (address, number of devices) of each node, the first rank's first.
        num_ranks: Ranks of the instance.
        port: Free port of the first node, where the ranks meet.

    Raises:
        ValueError: The nodes do not have one device per rank, or differ in numbers of devices.
    """
    counts = [count for _, count in nodes]
    if num_ranks != sum(counts) or len(set(counts)) > 1:
        raise ValueError(
            f"tensor_parallel_size x pipeline_parallel_size is {num_ranks}, and the instance has "
            f"{' + '.join(map(str, counts))} devices on {len(nodes)} nodes; expected one rank for "
            "each device, and equally many devices on each node. Change these sizes, or "
            "SchedulingSpec.gpu"
        )
    return {
        "nnodes": len(nodes),
        "node_rank": 0,
        "master_addr": nodes[0][0],
        "master_port": port,
        "distributed_executor_backend": "mp",
    }


class OtherNodes:
    """The ranks of an instance on its second and further nodes.

    Args:
        nodes: Starts processes on these nodes.
        arguments: Fields of AsyncEngineArgs, of the first node.
        addresses: Address of each node, the first one's included.

    Raises:
        RuntimeError: The instance has no such nodes.
    """

    def __init__(
        self, nodes: InstanceNodes, arguments: Mapping[str, Any], addresses: Sequence[str]
    ) -> None:
        self.failure: str | None = None
        """Why the ranks of a node have ended; None while they run."""
        self._closing = threading.Event()
        self._processes: list[NodeProcess] = []
        environment = internals.environment_of_ranks()
        for index, address in enumerate(addresses[1:], start=1):
            process = nodes.start(
                index, _run_node, {**arguments, "node_rank": index}, environment, address
            )
            self._processes.append(process)
            name = f"helmsman-vllm-node-{index}"
            threading.Thread(
                target=self._watch, args=(process, address), name=name, daemon=True
            ).start()

    def _watch(self, process: NodeProcess, address: str) -> None:
        """Wait until the ranks of a node have ended, and then end those of this node."""
        reason = "they have exited"
        try:
            process.wait()
        except RuntimeError as error:
            reason = str(error)
        if self._closing.is_set():
            return
        self.failure = self.failure or (
            f"vLLM's ranks on node {address} have ended: {reason}. For their output run: "
            f"{process.output}"
        )
        while not self._closing.is_set():
            internals.kill_cores()  # one may be started yet
            self._closing.wait(_KILL_EVERY_S)

    def close(self) -> None:
        """Kill the ranks of the other nodes. Idempotent."""
        self._closing.set()
        for process in self._processes:
            process.kill()


def _run_node(arguments: Mapping[str, Any], environment: Mapping[str, str], address: str) -> None:
    """Run the ranks of this node until one of them ends."""
    os.umask(internals.PRIVATE)
    os.environ.update(environment)
    os.environ["VLLM_HOST_IP"] = address
    for interface, own in ipv4_interfaces().items():
        if own == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    internals.run_ranks(arguments)
