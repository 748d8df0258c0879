"""Tests of devices of several nodes, which worker groups share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from helmsman.api.batch import Batch
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._groups.cluster import Cluster
from helmsman.controller._groups.resource_manager import Device, ResourceManager
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.group_workers import Member

pytestmark = pytest.mark.usefixtures("left_as_found")
ON_CPU = {"HELMSMAN_PLATFORM": "cpu"}


def _topology_order(run: RayScheduler, least: int) -> list[str]:
    return [node.node_id for node in run.nodes() if node.num_devices >= least]


def test_resource_manager_groups_and_bundles(run: RayScheduler) -> None:
    """An actor of the user in the bundle of a device gets this device."""

    @ray.remote(num_cpus=0, num_gpus=1)
    def where() -> tuple[str, list[str]]:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]

    with ResourceManager(2, scheduler=run) as manager:
        assert manager.num_nodes == 3
        assert [held.node_id for held in manager.nodes] == _topology_order(run, 2)
        assert [
            (each.index, each.node_rank, each.device_rank, each.device_id)
            for each in manager.devices
        ] == [(index, index // 2, index % 2, str(index % 2)) for index in range(6)]
        for node_rank, held in enumerate(manager.nodes):
            own = [device for device in manager.devices if device.node_rank == node_rank]
            assert {device.placement_group.id for device in own} == {held.placement_group.id}
            assert sorted(device.bundle for device in own if device.bundle is not None) == [0, 1]
            table = placement_group_table(held.placement_group)
            assert set(table["bundles_to_node_id"].values()) == {held.node_id}
            assert [bundle.get("GPU") for bundle in table["bundles"].values()] == [1.0] * 2
        assert sum(node.num_free_devices for node in run.nodes()) == 14
        strategies = [
            PlacementGroupSchedulingStrategy(each.placement_group, each.bundle)  # type: ignore[arg-type]
            for each in manager.devices
        ]
        found = ray.get(
            [where.options(scheduling_strategy=strategy).remote() for strategy in strategies]
        )
        assert found == [(device.node_id, [device.device_id]) for device in manager.devices]


def test_cluster_over_two_nodes(run: RayScheduler) -> None:
    with ResourceManager(2, 2, scheduler=run) as manager:
        config = ClusterConfig(device_mapping="0-3", tp_size=2, num_cpus=0.5, env_vars=ON_CPU)
        with Cluster("train", Member, manager, config) as train:  # type: ignore[var-annotated]
            assert train.rank_to_node == {rank: rank // 2 for rank in range(4)}
            assert [worker.node_id for worker in train.workers] == [
                manager.nodes[rank // 2].node_id for rank in range(4)
            ]
            assert [worker.devices for worker in train.workers] == [
                [str(rank % 2)] for rank in range(4)
            ]
            masks = train.method(Member.environment)(["CUDA_VISIBLE_DEVICES"])
            assert masks == [{"CUDA_VISIBLE_DEVICES": str(rank % 2)} for rank in range(4)]
            joined = train.method(Member.add)(Batch({"x": np.arange(8)}))
            assert joined is not None and joined["rank"] == [0, 0, 0, 0, 2, 2, 2, 2]
            # Large results go to other nodes directly, and a common value is put once.
            with train.method(Member.make).keep(2048) as kept:
                assert train.method(Member.rows_of)(kept[2046:2050]) == [
                    (rank, 2046 + rank + i) for rank in (0, 2) for i in (0, 1)
                ]
            value = np.arange(1 << 18)
            assert all(np.array_equal(each, value) for each in train.method(Member.echo)(value))  # type: ignore[arg-type]
            with Cluster(  # type: ignore[var-annotated]
                "reference",
                Member,
                manager,
                ClusterConfig(device_mapping="1,2-3", num_cpus=0.5, env_vars=ON_CPU),
            ) as other:
                assert other.colocated_with == ("train",)
                assert other.rank_to_node == {0: 0, 1: 1, 2: 1}


class Wide:
    """A worker with devices of several nodes."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices

    def actors_see(self) -> list[tuple[str, list[str]]]:
        """Return the node and devices of an actor in the bundle of each device."""

        @ray.remote(num_cpus=0, num_gpus=1)
        def where() -> tuple[str, list[str]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()["GPU"]

        strategies = [
            PlacementGroupSchedulingStrategy(each.placement_group, each.bundle)  # type: ignore[arg-type]
            for each in self._devices
        ]
        found: list[tuple[str, list[str]]] = ray.get(
            [where.options(scheduling_strategy=strategy).remote() for strategy in strategies]
        )
        return found


def test_cluster_worker_spans_nodes(run: RayScheduler) -> None:
    with ResourceManager(4, scheduler=run) as manager:
        config = ClusterConfig(
            device_mapping="list(range(2,6))", num_gpus_per_worker=4, env_vars=ON_CPU
        )
        own = manager.devices[2:6]
        with Cluster("wide", Wide, manager, config, kwargs={"devices": own}) as wide:  # type: ignore[var-annotated]
            assert wide.rank_to_devices == {0: own}
            assert wide.rank_to_node == {0: 0}
            assert wide.workers[0].node_id == manager.nodes[0].node_id
            assert wide.workers[0].devices == ["2", "3"], "the devices of its own node"
            assert [held.holder for held in manager.holders(4)] == ["wide"]
            assert wide.execute_rank_zero_sync("actors_see") == [
                (device.node_id, [device.device_id]) for device in own
            ]
