"""``helmsman.initialize``: the Ray cluster that a script runs on, found or started."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence

import msgspec

from helmsman.api.scheduler import Timeouts
from helmsman.controller._aio.event_loop import submit
from helmsman.controller._node.run_registry import default_log_dir, new_run_id
from helmsman.controller._placement.resources import ACCELERATORS, NodeState
from helmsman.controller._ray_backend.embedded import (
    current,
    end_connection,
    has_started_its_cluster,
    importing_ray,
    script_is_failing,
    settle,
)
from helmsman.controller._ray_backend.embedded_start import connect

_END_S = 10.0


class RayCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster to which this process is connected; a context manager, which disconnects at its
    end.
    """

    address: str
    """Of its head, 'host:port'."""
    nodes: tuple[NodeState, ...]
    """Those that live."""
    is_embedded: bool
    """Whether it was started here, and ends with this process."""

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
    """Connect this process to the cluster that it belongs to, and to no other.

    Under ``helmsman up``, in a job that was submitted to Ray, or on KubeRay, which all set
    RAY_ADDRESS, that cluster is joined and nothing is started; under ``helmsman up`` its nodes must
    be those of the run. Elsewhere a cluster of this machine alone is started, which ends with this
    process; a script that a launcher has started on several nodes is refused there, since each
    would run alone (RAY_ADDRESS=local allows it). A RayScheduler made afterwards uses the same
    cluster.

    Args:
        num_cpus, num_gpus, resources: logical resources of a cluster that is started; what this
            process may use when None.
        preload: modules that the workers of such a cluster find imported already; see RayScheduler.

    Raises: ClusterNotFoundError (no one answers at RAY_ADDRESS), ClusterMismatchError (it is
        another run's), ClusterNotUpError (several nodes, and no RAY_ADDRESS),
        BackendNotInstalledError.
    """
    with importing_ray("initialize"):
        import ray

        from helmsman.controller._ray_backend import cluster_state
        from helmsman.controller._ray_backend.cluster_state import choose_address
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
    submit(end_connection(current(), _END_S, keep_session=script_is_failing())).result()
