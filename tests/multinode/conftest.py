"""Clusters of several raylets on this machine, with logical devices; the driver is connected to the head, which has none."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="several nodes need Ray")

import helmsman.controller._ray_backend.scheduler  # noqa: F401 - decides how clusters authenticate, before Ray is imported

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_worker_niceness", "0")
# A raylet that answers its head late on a busy machine is no lost node (Ray's limit is 10 s); one that has ended refuses
# connections, and is lost after five of them.
os.environ.setdefault("RAY_health_check_timeout_ms", "120000")
os.environ.setdefault("RAY_health_check_period_ms", "1000")

import ray
from ray.cluster_utils import Cluster

from helmsman.api.scheduler import Timeouts
from helmsman.controller._ray_backend.scheduler import RayScheduler
from helmsman.rpc_server._ray_forks.ray_patches import only_core_processes
from tests.contract.conftest import gate  # noqa: F401 - a fixture of these tests too
from tests.contract.helpers import wait_until

TIMEOUTS = Timeouts(start_s=180.0, create_engine_s=120.0, call_s=120.0, health_s=20.0, shutdown_s=8.0)
GB = 10**9
_numbers = itertools.count()


def gpu_node(**more: Any) -> dict[str, Any]:
    """A node of eight GPUs; arguments of Cluster.add_node."""
    return {"num_cpus": 32, "num_gpus": 8, "memory": 64 * GB, **more}


def npu_node(**more: Any) -> dict[str, Any]:
    """A node of eight NPUs."""
    resources = {"NPU": 8, **more.pop("resources", {})}
    return {"num_cpus": 32, "num_gpus": 0, "memory": 64 * GB, "resources": resources, **more}


class Nodes:
    """A running cluster."""

    def __init__(self, shapes: list[dict[str, Any]]) -> None:
        with only_core_processes():
            self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0, "memory": 8 * GB})
        try:
            for shape in shapes:
                self.add(**shape)
            ray.init(address=self.cluster.address, log_to_driver=False, namespace="tests")
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Where a driver joins."""
        return str(self.cluster.address)

    def add(self, **shape: Any) -> Any:
        """Add a node and return it, for ``remove``."""
        with only_core_processes():
            return self.cluster.add_node(**shape)

    def free(self) -> dict[str, dict[str, float]]:
        """What is free on each node; what Ray derives from groups shows whether one is left."""
        from ray._private.state import available_resources_per_node

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return {
            node_id: {name: amount for name, amount in resources.items() if "object_store" not in name}
            for node_id, resources in available_resources_per_node().items()
            if node_id in alive
        }

    def close(self) -> None:
        """End it."""
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def start_nodes() -> Iterator[Callable[..., Nodes]]:
    """Start a cluster of these nodes, beside its head without accelerators."""
    started: list[Nodes] = []

    def start(*shapes: dict[str, Any]) -> Nodes:
        started.append(Nodes(list(shapes)))
        return started[-1]

    yield start
    for nodes in started:
        nodes.close()


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., RayScheduler]]:
    """Make a scheduler of its own run in the connected cluster."""
    made: list[RayScheduler] = []

    def make(**options: Any) -> RayScheduler:
        log_dir = tmp_path / f"run-{next(_numbers)}"
        made.append(RayScheduler(**{"timeouts": TIMEOUTS, "log_dir": log_dir, **options}))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


@pytest.fixture
def run(make_run: Callable[..., RayScheduler]) -> RayScheduler:
    """One run."""
    return make_run()


@pytest.fixture
def left_as_found(nodes: Nodes) -> Iterator[None]:
    """What is free after the test is what was free before it."""
    before = nodes.free()
    yield
    wait_until(lambda: nodes.free() == before, f"free as before: {before}", limit_s=10.0)
