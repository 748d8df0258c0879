"""``helmsman.initialize``: connects a script to its Ray cluster, or starts one."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence

import msgspec

from helmsman._base.event_loop import submit
from helmsman.api.scheduler import Timeouts
from helmsman.controller._placement.resources import ACCELERATORS, NodeState
from helmsman.controller._scheduler.driver_log import script_failure
from helmsman.controller._scheduler.ray.embedded import (
    current,
    end_connection,
    has_started_its_cluster,
    importing_ray,
    settle,
)
from helmsman.controller._scheduler.ray.embedded_start import connect
from helmsman.controller._scheduler.run_registry import default_log_dir, new_run_id

_END_S = 10.0


class RayCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A Ray cluster to which this process is connected; a context manager that disconnects."""

    address: str
    """Address of the head, 'host:port'."""
    nodes: tuple[NodeState, ...]
    """Live nodes."""
    is_embedded: bool
    """Whether this process started the cluster, which then ends with it."""

    @property
    def num_devices(self) -> Mapping[str, int]:
        """Accelerators of all nodes, by kind: {'GPU': 16}."""
        totals = {
            name: int(sum(node.total.get(name, 0.0) for node in self.nodes))
            for name in ACCELERATORS
        }
        return {name: total for name, total in totals.items() if total}

    def close(self) -> None:
        """Disconnect; an embedded cluster ends. Idempotent."""
        _close()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def initialize(
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    resources: dict[str, float] | None = None,
    preload: Sequence[str] | None = ("torch",),
) -> RayCluster:
    """Connect this process to the Ray cluster that it belongs to.

    If RAY_ADDRESS is set, as under ``helmsman up``, in a job submitted to Ray or on KubeRay, that
    cluster is joined and nothing is started. Under ``helmsman up`` its nodes must be those of the
    run. Otherwise a cluster on this machine is started, which ends with this process. A script that
    a launcher starts on several nodes is then rejected, since each process would run alone
    (RAY_ADDRESS=local allows it). A RayScheduler that is created later uses the same cluster.

    Args:
        num_cpus: CPUs of a started cluster; by default those that this process may use.
        num_gpus: Accelerators of a started cluster; by default those that this process may use.
        resources: Custom resources of a started cluster.
        preload: Modules that are imported in advance for its workers; see RayScheduler.

    Returns:
        The cluster.

    Raises:
        ClusterNotFoundError: Nothing responds at RAY_ADDRESS.
        ClusterMismatchError: The cluster belongs to another run.
        ClusterNotUpError: There are several nodes, and RAY_ADDRESS is not set.
        BackendNotInstalledError: Ray is not installed.
    """
    with importing_ray("initialize"):
        import ray

        from helmsman.controller._scheduler.ray import cluster_state
        from helmsman.controller._scheduler.ray.cluster_state import choose_address
    settle(Timeouts().start_s)
    address = choose_address(None)
    if address is not None:
        run_id = new_run_id()
        sizes = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": resources}
        connect(address, run_id, sizes, default_log_dir(run_id), preload)
        atexit.register(_close)
    return RayCluster(
        address=ray.get_runtime_context().gcs_address,
        nodes=cluster_state.snapshot().nodes,
        is_embedded=has_started_its_cluster(),
    )


def _close() -> None:
    atexit.unregister(_close)
    submit(end_connection(current(), _END_S, keep_session=script_failure() is not None)).result()
