"""Test the validation of worker groups' configurations, without workers."""

from __future__ import annotations

import pytest

from helmsman.api.errors import InvalidSpecError
from helmsman.api.worker_group import ClusterConfig


def test_config_topology_before_start() -> None:
    config = ClusterConfig(
        device_mapping="list(range(0,16))", num_gpus_per_worker=2, tp_size=2, pp_size=2, vp_size=3
    )
    topology = config.topology()
    assert (config.num_workers(), topology.world_size, config.vp_size) == (8, 8, 3)
    assert (topology.dp_size, topology.tp_size, topology.pp_size, topology.cp_size) == (2, 2, 2, 1)
    assert topology.get_rank_info(5).pp_rank == 1
    assert ClusterConfig(world_size=3).topology().dp_size == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ClusterConfig(), "world_size is None; expected a number of workers, or a device_mapping"),
        (ClusterConfig(device_mapping="0-2", num_gpus_per_worker=2), "a divisor of the 3 devices"),
        (
            ClusterConfig(world_size=3, tp_size=2),
            "world_size is 3; tp 2 x pp 1 x cp 1 requires 2 or 4",
        ),
    ],
)
def test_config_refused_before_start(config: ClusterConfig, message: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        config.topology("actor")
    assert message in str(caught.value) and "actor" in str(caught.value)
