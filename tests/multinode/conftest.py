"""Clusters of several raylets on this machine, with logical devices; the driver is connected to the
head, which has none.
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
import helmsman.controller._ray_backend.scheduler  # noqa: F401

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_worker_niceness", "0")
# A raylet that answers its head late on a busy machine is no lost node (Ray's limit is 10 s); one
# that has ended refuses connections, and is lost after five of them.
os.environ.setdefault("RAY_health_check_timeout_ms", "120000")
os.environ.setdefault("RAY_health_check_period_ms", "1000")

import ray
from ray.cluster_utils import Cluster

from helmsman.api.scheduler import Timeouts
from helmsman.controller._ray_backend.scheduler import RayScheduler
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

    With ``log_dir``, where fork servers log, the head and its first nodes fork their workers. Other
    nodes start each by Ray's own command, which takes a second of CPU time.
    """

    def __init__(self, shapes: list[dict[str, Any]], log_dir: Path | None = None) -> None:
        self._forks: list[RayForks] = []
        # or the head starts a worker for each of its CPUs
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
        """Where a driver joins."""
        return str(self.cluster.address)

    def add(self, **shape: Any) -> Any:
        """Add a node and return it, for ``remove``."""
        with only_core_processes():
            return self.cluster.add_node(**shape)

    @contextlib.contextmanager
    def added(self, *shapes: dict[str, Any]) -> Iterator[list[Any]]:
        """Nodes that are gone after the block."""
        with contextlib.ExitStack() as stack:
            nodes = []
            for shape in shapes:
                nodes.append(self.add(**shape))
                stack.callback(self.cluster.remove_node, nodes[-1])
            yield nodes
        left = {node.node_id for node in nodes}
        wait_until(lambda: not left & self.free().keys(), "the head has seen them go")

    def free(self) -> dict[str, dict[str, float]]:
        """What is free on each node; what Ray derives from groups shows whether one is left."""
        from ray._private.state import available_resources_per_node

        available = available_resources_per_node()
        return {node_id: _without_store(available.get(node_id, {})) for node_id in self.total()}

    def total(self) -> dict[str, dict[str, float]]:
        """What each node has."""
        return {
            node["NodeID"]: _without_store(node["Resources"])
            for node in ray.nodes()
            if node["Alive"]
        }

    def close(self) -> None:
        """End it."""
        ray.shutdown()
        self.cluster.shutdown()
        for forks in self._forks:
            forks.stop()


def _without_store(resources: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if "object_store" not in name}


Open = Callable[..., Nodes]


@pytest.fixture(scope="package")
def open_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Open a cluster of these nodes, beside its head without accelerators; the one that is open if
    it has this name.

    A process is connected to one cluster at a time, so opening another closes it.
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
    """Two nodes of eight GPUs and one of four, in two racks; its tests leave it as it was."""
    return open_nodes(
        "fleet",
        gpu_node(labels={"rack": "a", "kind": "GPU"}),
        gpu_node(labels={"rack": "b", "kind": "GPU"}, resources={"license": 1}),
        gpu_node(num_gpus=4, labels={"rack": "b"}),
    )


@pytest.fixture(scope="module")
def nodes(fleet: Nodes) -> Nodes:
    """The cluster of a module; the fleet unless the module has another."""
    return fleet


@pytest.fixture(scope="module")
def base(open_nodes: Open) -> Nodes:
    """A node of two GPUs that lives on; tests add those that go."""
    return open_nodes("base", gpu_node(num_gpus=2))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that share a cluster run one after another."""
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    if own:
        at = items.index(own[0])
        items[:] = [item for item in items if item.path.parent != Path(__file__).parent]
        items[at:at] = sorted(own, key=_cluster)


def _cluster(item: pytest.Item) -> int:
    names = getattr(item, "fixturenames", ())
    return next((index for index, name in enumerate(("fleet", "base")) if name in names), 2)


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
    """All of the cluster is free after the test."""
    yield
    wait_until(
        lambda: nodes.free() == nodes.total(), f"all is free again: {nodes.total()}", limit_s=10.0
    )
