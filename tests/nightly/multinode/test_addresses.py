"""Tests of addresses beside a second cluster, and of the ports of Ray workers."""

from __future__ import annotations

from typing import Any

import pytest
from ray.cluster_utils import Cluster

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._scheduler.ray.cluster_state import choose_address
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.multinode.conftest import Nodes


def test_channel_port_of_ray_workers(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helmsman.controller._scheduler.ray.transport.HAS_SEGMENTS", False)
    ranged = {
        "num_cpus": 1,
        "resources": {"ranged": 1},
        "min_worker_port": 23_200,
        "max_worker_port": 23_299,
    }
    with nodes.added(ranged), RayScheduler(address=nodes.address) as run:
        (worker,) = run.create_workers(
            Job(role="r", tasks=[SchedulingSpec(resources={"ranged": 1})])
        )
        transport: Any = run._roles.client(worker).transport
        assert 23_200 <= transport._socket.getpeername()[1] <= 23_299


def test_address_auto(nodes: Nodes) -> None:
    from ray._private import services

    if services._find_address_from_flag("--gcs-address") != {nodes.address}:
        pytest.skip("another Ray runs on this machine")
    assert choose_address("auto") is None
    second = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        with pytest.raises(errors.AmbiguousAddressError) as caught:
            choose_address("auto")
        assert {nodes.address, second.address} <= set(caught.value.candidates), (
            "other Rays may have started"
        )
        assert "RAY_ADDRESS" in str(caught.value)
    finally:
        second.shutdown()
