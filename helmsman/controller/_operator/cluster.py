"""Queries on the nodes of a Ray cluster, for runs whose script runs on another machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_ANSWER_S = 60.0


def attach(address: str | None) -> Sequence[Mapping[str, Any]]:
    """Attach to a running cluster, never start one; returns its live nodes.

    Args:
        address: Address of the cluster; RAY_ADDRESS, or the cluster of this machine when None.
    """
    from helmsman.controller._ray_backend.cluster_state import alive_nodes, choose_address

    chosen = choose_address(address or os.environ.get("RAY_ADDRESS") or "auto")
    if chosen is not None:
        import ray

        ray.init(
            address=chosen,
            namespace="helmsman-cli",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    return alive_nodes()


def start_on(
    node: Mapping[str, Any], function: Callable[..., Any], *arguments: Any, **keywords: Any
) -> Any:
    """Run a function on a node; returns the reference of its result."""
    import ray

    from helmsman.controller._ray_backend.placement_groups import on_node

    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    return task.options(scheduling_strategy=on_node(node["NodeID"])).remote(*arguments, **keywords)


def on_all(nodes: Sequence[Mapping[str, Any]], function: Callable[..., T], *args: Any) -> list[T]:
    """Run a function on all nodes at once; returns the results in their order."""
    import ray

    started = [start_on(node, function, *args) for node in nodes]
    return [ray.get(each, timeout=_ANSWER_S) for each in started]
