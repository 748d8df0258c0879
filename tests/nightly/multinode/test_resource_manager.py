"""Tests of NPUs, CPUs and some of the devices, which worker groups share."""

from __future__ import annotations

import pytest

from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._groups.cluster import Cluster
from helmsman.controller._groups.resource_manager import ResourceManager
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.group_workers import Member
from tests.multinode.conftest import Nodes, npu_node

pytestmark = pytest.mark.usefixtures("left_as_found")
ON_CPU = {"HELMSMAN_PLATFORM": "cpu"}


def test_resource_manager_of_npus(nodes: Nodes, run: RayScheduler) -> None:
    with nodes.added(npu_node(resources={"NPU": 9})), ResourceManager(9, scheduler=run) as manager:
        assert [device.device_id for device in manager.devices] == [
            str(index) for index in range(9)
        ]
        with Cluster(  # type: ignore[var-annotated]
            "npu",
            Member,
            manager,
            ClusterConfig(device_mapping="7,8", num_cpus=0.5, env_vars=ON_CPU),
        ) as group:
            masks = group.method(Member.environment)(
                ["ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]
            )
            assert masks == [
                {"ASCEND_RT_VISIBLE_DEVICES": name, "CUDA_VISIBLE_DEVICES": ""} for name in "78"
            ]


def test_cluster_of_cpus_spreads(run: RayScheduler) -> None:
    with (
        ResourceManager(4, 2, scheduler=run) as manager,
        ResourceManager(0, 3, scheduler=run, name="cpus") as cpus,
    ):
        with Cluster("reward", Member, manager, ClusterConfig(world_size=4)) as reward:  # type: ignore[var-annotated]
            assert reward.rank_to_node == {0: 0, 1: 1, 2: 0, 3: 1}
            assert [worker.node_id for worker in reward.workers] == [
                manager.nodes[reward.rank_to_node[rank]].node_id for rank in range(4)
            ]
        with Cluster("tools", Member, cpus, ClusterConfig(world_size=3)) as tools:  # type: ignore[var-annotated]
            assert tools.rank_to_node == {0: 0, 1: 1, 2: 2}
        with Cluster("odd", Member, manager, ClusterConfig(world_size=3)) as odd:  # type: ignore[var-annotated]
            assert odd.rank_to_node == {0: 0, 1: 1, 2: 0}


def test_resource_manager_of_some_devices(run: RayScheduler) -> None:
    with (
        # The first needs the large nodes; the second may use the small one.
        ResourceManager(4, 3, scheduler=run, name="wide") as wide,
        ResourceManager(2, 1, scheduler=run, name="narrow") as narrow,
    ):
        assert narrow.num_devices == 2
        assert len({held.node_id for held in wide.nodes}) == 3
        held = [
            (each.node_id, each.device_id) for manager in (wide, narrow) for each in manager.devices
        ]
        assert len(set(held)) == 14
