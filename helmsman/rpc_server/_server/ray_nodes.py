"""Processes of an instance that spans nodes: one Ray actor on each node but the worker's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from helmsman.api.workers import InstanceNodes, NodeProcess


class RayNodes(InstanceNodes):
    """The bundles of this worker's placement group, one on each node; the worker's is the first."""

    def start(self, node: int, target: Callable[..., None], *args: Any) -> NodeProcess:
        """See InstanceNodes.start."""
        group = get_current_placement_group()
        if group is None or node >= len(group.bundle_specs):
            raise RuntimeError(
                f"this worker's placement group has no bundle on node {node} of its instance"
            )
        devices = dict(group.bundle_specs[node])
        actor: Any = ray.remote(InstanceNode).options(
            num_cpus=0,
            num_gpus=devices.pop("GPU", 0),
            resources=devices,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, node),
        )
        return _Process(actor.remote(), target, args)


class InstanceNode:
    def run(self, target: Callable[..., None], *args: Any) -> None:
        target(*args)


class _Process(NodeProcess):
    def __init__(self, actor: Any, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._actor = actor
        self._run = actor.run.remote(target, *args)
        self.output = f"ray logs actor --id {actor._actor_id.hex()}"

    def wait(self) -> None:
        try:
            ray.get(self._run)
        except ray.exceptions.RayError as error:
            raise RuntimeError(" ".join(str(error).split())) from error

    def kill(self) -> None:
        ray.kill(self._actor)
