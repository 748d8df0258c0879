"""Workers of a Cluster as rollout instances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._groups.cluster import Cluster
from helmsman.controller._groups.resource_manager import ResourceManager
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.contract.groups import ON_CPU
from tests.controller.engines import CountingRollout


class Generator(CountingRollout):
    """A rollout engine that counts requests and has a flag for sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asleep = False

    def state(self) -> tuple[bool, bool]:
        """Return whether ``initialize`` has run, and whether the engine sleeps."""
        return self.ready, self.is_asleep

    async def sleep(self, level: int = 1) -> None:
        self.is_asleep = True

    async def wake(self, *, weights_only: bool = False) -> None:
        self.is_asleep = False


@pytest.fixture
def cluster(resources: ResourceManager, role: str) -> Iterator[Cluster[Generator]]:
    """Provide four instances of two devices each."""
    config = ClusterConfig(
        device_mapping="list(range(0,8))", num_gpus_per_worker=2, num_cpus=0.5, env_vars=ON_CPU
    )
    with Cluster(role, Generator, resources, config) as made:  # type: ignore[var-annotated]
        yield made


def test_cluster_serves_requests(cluster: Cluster[Generator]) -> None:
    with RolloutController(cluster.scheduler, Generator, cluster) as rollout:
        assert [worker.id for worker in rollout.workers] == [
            f"{cluster.name}/{k}" for k in range(4)
        ]
        assert [each.token_ids for each in rollout.generate([[n] for n in range(1, 41)])] == [
            [n + 1] for n in range(1, 41)
        ]
        assert all(ready for ready, _ in cluster.execute_all_sync("state"))
        assert rollout.update_weights({"weight": [1.0]}, 3) == 3
        assert cluster.execute_all_sync("get_version") == [3] * 4
        counts = [len(served) for _, _, served in cluster.execute_all_sync("figures")]
        assert sum(counts) == 40 and min(counts) > 0
    assert cluster.execute_all_sync("get_version") == [3] * 4, "its workers still run"
    with RolloutController(cluster.scheduler, Generator, cluster) as rollout:
        assert rollout.generate_one([1]).versions == [3]


def test_cluster_sleeps_by_devices(cluster: Cluster[Generator]) -> None:
    with RolloutController(cluster.scheduler, Generator, cluster) as rollout:
        chosen = cluster.workers_on([5, 6])
        assert chosen == list(rollout.workers[2:])
        assert cluster.workers_on("list(range(4,8))") == chosen
        rollout.sleep(worker_ids=chosen)
        asleep = [asleep for _, asleep in cluster.execute_all_sync("state")]
        assert asleep == [False, False, True, True]
        rollout.generate([[1]] * 20)
        counts = [len(served) for _, _, served in cluster.execute_all_sync("figures")]
        assert counts[2:] == [0, 0] and sum(counts) == 20
        rollout.wake(worker_ids=chosen)
        assert not any(asleep for _, asleep in cluster.execute_all_sync("state"))
        rollout.generate([[1]] * 20)
        assert all(served for _, _, served in cluster.execute_all_sync("figures"))
    with pytest.raises(errors.InvalidSpecError, match="at least one of the cluster's devices, 0-7"):
        cluster.workers_on([9])


def test_cluster_rollout_refuses(cluster: Cluster[Generator], resources: ResourceManager) -> None:
    scheduler = cluster.scheduler
    with RolloutController(scheduler, Generator, cluster) as rollout:
        for resize in (
            lambda: rollout.add(),
            lambda: rollout.scale(2),
            lambda: rollout.remove(rollout.workers[:1]),
        ):
            with pytest.raises(
                errors.InvalidSpecError,
                match=f"configuration of Cluster '{cluster.name}' fixes the number of its workers",
            ):
                resize()
    wrong: Any = {"role": "a"}
    with pytest.raises(TypeError, match="RolloutController: the argument job is .*, expected Job"):
        RolloutController(scheduler, Generator, wrong)
    with pytest.raises(ValueError, match=f"those of Cluster '{cluster.name}'; pass them to the"):
        RolloutController(scheduler, Generator, cluster, (1,))
    config = ClusterConfig(device_mapping="0-3", tp_size=2, num_cpus=0.5, env_vars=ON_CPU)
    with (
        Cluster(f"{cluster.name}-tp", Generator, resources, config) as parallel,  # type: ignore[var-annotated]
        pytest.raises(
            errors.InvalidSpecError,
            match=r"dp_size .* 2.*each worker of the Cluster is an instance",
        ),
    ):
        RolloutController(scheduler, Generator, parallel)
