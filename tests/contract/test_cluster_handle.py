"""Handles of a Cluster in workers and in Ray actors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helmsman.api.worker_group import ClusterConfig, GroupWorker
from helmsman.controller._worker_groups.cluster import Cluster
from helmsman.controller._worker_groups.resource_manager import ResourceManager
from tests.contract.groups import ON_CPU, Members
from tests.contract.helpers import LIMIT_S
from tests.contract.marks import only_ray, ray_smoke


@ray_smoke
@only_ray
def test_handle_in_ray_actor(make_cluster: Callable[..., Members]) -> None:
    import ray

    class Caller:
        """An actor of the user, which has been given a Cluster."""

        def __init__(self, cluster: Any) -> None:
            self._cluster = cluster

        async def run(self) -> Any:
            return await self._cluster.execute_all_async("echo", 7)

    cluster = make_cluster(device_mapping="0-3", tp_size=2)
    remote_class: Any = ray.remote(num_cpus=0)(Caller)
    actor = remote_class.remote(cluster)
    assert ray.get(actor.run.remote(), timeout=LIMIT_S) == [7] * 4
    ray.kill(actor)


class Storage:
    """Values that all workers of a run share."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put_if_absent(self, key: str, value: Any) -> bool:
        return self._values.setdefault(key, value) is value

    def get(self, key: str) -> Any:
        return self._values.get(key)


class StorageUser(GroupWorker):
    """A worker whose constructor is given a Cluster."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def first(self) -> tuple[bool, int]:
        rank = self.rank_info.rank
        was_first = self._storage.execute_rank_zero_sync("put_if_absent", "rank", [rank])
        return was_first, self._storage.execute_rank_zero_sync("get", "rank")[0]


def test_handle_in_worker(resources: ResourceManager, role: str) -> None:
    config = ClusterConfig(world_size=1, num_cpus=0.5, env_vars=ON_CPU)
    users = ClusterConfig(world_size=3, num_cpus=0.5, env_vars=ON_CPU)
    with (
        Cluster(f"{role}-storage", Storage, resources, config) as storage,  # type: ignore[var-annotated]
        Cluster(role, StorageUser, resources, users, kwargs={"storage": storage}) as group,  # type: ignore[var-annotated]
    ):
        found = group.execute_all_sync("first")
        assert sum(was_first for was_first, _ in found) == 1
        (winner,) = [rank for rank, (was_first, _) in enumerate(found) if was_first]
        assert [seen for _, seen in found] == [winner] * 3
