"""Clusters of several raylets on this machine, with logical devices. The driver is connected to the
head, which has no devices.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="several nodes need Ray")

# Decides how clusters authenticate, before Ray is imported
import helmsman.controller._scheduler.ray.scheduler  # noqa: F401

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray counts a raylet as lost after 10 s without an answer, which is too short on a busy machine. A
# raylet that has ended refuses connections, and is lost after five attempts.
os.environ.setdefault("RAY_health_check_timeout_ms", "120000")
os.environ.setdefault("RAY_health_check_period_ms", "1000")

import ray
from ray.cluster_utils import Cluster

from helmsman.api.scheduler import Timeouts
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from helmsman.rpc_server._ray_forks.install import RayForks
from helmsman.rpc_server._ray_forks.ray_patches import only_core_processes
from tests.contract.conftest import gate  # noqa: F401 - a fixture of these tests too
from tests.contract.helpers import wait_until

TIMEOUTS = Timeouts(
    start_s=180.0, create_engine_s=120.0, call_s=120.0, health_s=20.0, shutdown_s=8.0
)
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
    """A running cluster.

    With ``log_dir``, the folder of the fork servers' logs, the head and its first nodes fork their
    workers. Other nodes start workers by Ray's own command, which takes a second of CPU time each.
    """

    def __init__(self, shapes: list[dict[str, Any]], log_dir: Path | None = None) -> None:
        self._forks: list[RayForks] = []
        # Otherwise the head starts a worker for each of its CPUs.
        no_prestart = {"RAY_prestart_worker_first_driver": "0"}
        head = {"num_cpus": 4, "num_gpus": 0, "memory": 8 * GB, "env_vars": no_prestart}
        with only_core_processes(), self._forking(log_dir):
            self.cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for shape in shapes:
                with self._forking(log_dir):
                    self.add(**shape)
            ray.init(address=self.cluster.address, log_to_driver=False, namespace="tests")
        except BaseException:
            self.close()
            raise

    def _forking(self, log_dir: Path | None) -> contextlib.AbstractContextManager[None]:
        if log_dir is None:
            return contextlib.nullcontext()
        log_path = log_dir / f"forkserver-{len(self._forks)}.log"
        self._forks.append(RayForks(secrets.token_hex(5), log_path, preload=()))
        return self._forks[-1].serving_the_raylet()

    @property
    def address(self) -> str:
        """Address of the cluster."""
        return str(self.cluster.address)

    def add(self, **shape: Any) -> Any:
        """Add a node and return it, for ``remove``."""
        with only_core_processes():
            return self.cluster.add_node(**shape)

    @contextlib.contextmanager
    def added(self, *shapes: dict[str, Any]) -> Iterator[list[Any]]:
        """Add nodes, and remove them after the block."""
        with contextlib.ExitStack() as stack:
            nodes = []
            for shape in shapes:
                nodes.append(self.add(**shape))
                stack.callback(self.cluster.remove_node, nodes[-1])
            yield nodes
        left = {node.node_id for node in nodes}
        wait_until(lambda: not left & self.free().keys(), "the head has detected their end")

    def free(self) -> dict[str, dict[str, float]]:
        """Return the free resources of each node, with those of placement groups."""
        from ray._private.state import available_resources_per_node

        available = available_resources_per_node()
        return {node_id: _without_store(available.get(node_id, {})) for node_id in self.total()}

    def total(self) -> dict[str, dict[str, float]]:
        """Return the resources of each node."""
        return {
            node["NodeID"]: _without_store(node["Resources"])
            for node in ray.nodes()
            if node["Alive"]
        }

    def close(self) -> None:
        """End the cluster."""
        ray.shutdown()
        self.cluster.shutdown()
        for forks in self._forks:
            forks.stop()


def _without_store(resources: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if "object_store" not in name}


Open = Callable[..., Nodes]


@pytest.fixture(scope="package")
def open_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Open a cluster of these nodes and a head without devices, or return it if it is open.

    A process is connected to one cluster at a time, so opening another closes the first.
    """
    current: list[tuple[str, Nodes]] = []

    def open_(name: str, *shapes: dict[str, Any]) -> Nodes:
        if not current or current[0][0] != name:
            close()
            current.append((name, Nodes(list(shapes), tmp_path_factory.mktemp("nodes"))))
        return current[0][1]

    def close() -> None:
        while current:
            current.pop()[1].close()

    yield open_
    close()


@pytest.fixture(scope="module")
def fleet(open_nodes: Open) -> Nodes:
    """Two nodes of eight GPUs and one of four, in two racks, which the tests do not change."""
    return open_nodes(
        "fleet",
        gpu_node(labels={"rack": "a", "kind": "GPU"}),
        gpu_node(labels={"rack": "b", "kind": "GPU"}, resources={"license": 1}),
        gpu_node(num_gpus=4, labels={"rack": "b", "elastic": "yes"}),
    )


@pytest.fixture(scope="module")
def nodes(fleet: Nodes) -> Nodes:
    """The cluster of a module, by default the fleet."""
    return fleet


@pytest.fixture(scope="module")
def base(open_nodes: Open) -> Nodes:
    """A node of two GPUs; the tests add other nodes and end them."""
    return open_nodes("base", gpu_node(num_gpus=2))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run modules that share a cluster one after another."""
    sort_by_cluster(items, Path(__file__).parent)


def sort_by_cluster(items: list[pytest.Item], folder: Path) -> None:
    """Sort the tests of a folder by the fixtures of their clusters."""

    def cluster(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        return next((index for index, name in enumerate(("fleet", "base")) if name in names), 2)

    own = [item for item in items if item.path.parent == folder]
    if own:
        at = items.index(own[0])
        items[:] = [item for item in items if item.path.parent != folder]
        items[at:at] = sorted(own, key=cluster)


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., RayScheduler]]:
    """Make a scheduler in the connected cluster."""
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
    """A scheduler in the connected cluster."""
    return make_run()


@pytest.fixture
def left_as_found(nodes: Nodes) -> Iterator[None]:
    """Check that all resources of the cluster are free after the test."""
    yield
    wait_until(
        lambda: nodes.free() == nodes.total(), f"all is free again: {nodes.total()}", limit_s=10.0
    )
