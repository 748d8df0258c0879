"""A Cluster's workers as rollout instances, on every scheduler."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Scheduler
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._generation.health import Health, SupervisionPolicy
from helmsman.controller._generation.retries import RetryGeneration
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._worker_groups.cluster import Cluster
from helmsman.controller._worker_groups.resource_manager import ResourceManager
from tests.contract.helpers import wait_until
from tests.controller.engines import CountingRollout

ON_CPU = {"HELMSMAN_PLATFORM": "cpu"}
"""The devices of these tests are numbers only."""
POLICY = SupervisionPolicy(probe_every_s=0.1, suspect_s=5.0, dead_s=20.0, restart_pause_s=0.05)


class Generator(CountingRollout):
    """A rollout engine that sleeps and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asleep = False

    def where(self) -> tuple[int, bool, bool]:
        """Its process, whether ``initialize`` has run, and whether it sleeps."""
        return os.getpid(), self.ready, self.is_asleep

    async def sleep(self, level: int = 1) -> None:
        self.is_asleep = True

    async def wake(self, *, weights_only: bool = False) -> None:
        self.is_asleep = False


@pytest.fixture(scope="module")
def resources(scheduler: Scheduler) -> Iterator[ResourceManager]:
    manager = ResourceManager(8, scheduler=scheduler)
    yield manager
    manager.destroy_placement_group()


@pytest.fixture
def cluster(resources: ResourceManager, role: str) -> Iterator[Cluster[Generator]]:
    """Four instances of two devices each."""
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
        assert all(ready for _, ready, _ in cluster.execute_all_sync("where"))
        assert rollout.update_weights({"weight": [1.0]}, 3) == 3
        assert cluster.execute_all_sync("get_version") == [3] * 4
        counts = [len(served) for _, _, served in cluster.execute_all_sync("figures")]
        assert sum(counts) == 40 and min(counts) > 0
    assert cluster.execute_all_sync("get_version") == [3] * 4, "its workers live on"
    with RolloutController(cluster.scheduler, Generator, cluster) as rollout:
        assert rollout.generate_one([1]).versions == [3]


def test_cluster_sleeps_by_devices(cluster: Cluster[Generator]) -> None:
    with RolloutController(cluster.scheduler, Generator, cluster) as rollout:
        chosen = cluster.workers_on([5, 6])
        assert chosen == list(rollout.workers[2:])
        assert cluster.workers_on("list(range(4,8))") == chosen
        rollout.sleep(worker_ids=chosen)
        assert [asleep for *_, asleep in cluster.execute_all_sync("where")] == [
            False,
            False,
            True,
            True,
        ]
        rollout.generate([[1]] * 20)
        counts = [len(served) for _, _, served in cluster.execute_all_sync("figures")]
        assert counts[2:] == [0, 0] and sum(counts) == 20
        rollout.wake(worker_ids=chosen)
        assert not any(asleep for *_, asleep in cluster.execute_all_sync("where"))
        rollout.generate([[1]] * 20)
        assert all(served for _, _, served in cluster.execute_all_sync("figures"))
    with pytest.raises(errors.InvalidSpecError, match="at least one of the cluster's devices, 0-7"):
        cluster.workers_on([9])


@pytest.mark.not_on("inline", "its workers are not processes")
def test_cluster_worker_is_rebuilt_under_supervision(cluster: Cluster[Generator]) -> None:
    with RolloutController(
        cluster.scheduler, Generator, cluster, supervision=POLICY, retries=RetryGeneration()
    ) as rollout:
        rollout.update_weights({"weight": [1.0]}, 2)
        dead = cluster.execute_on([1], "where")[0][0]
        os.kill(dead, signal.SIGKILL)
        id_ = rollout.workers[1].id
        assert len(rollout.generate([[1]] * 20)) == 20
        wait_until(
            lambda: (
                rollout.stats().instances[id_].state is Health.HEALTHY
                and cluster.health()[1].pid not in (None, dead)
            ),
            "it serves again",
        )
        pid, ready, _ = cluster.execute_on([1], "where")[0]
        assert pid != dead and ready
        assert rollout.versions()[id_] == 2
        assert cluster.health()[1].pid == pid


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
