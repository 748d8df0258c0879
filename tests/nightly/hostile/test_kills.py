"""Tests that kills at random points lose and repeat no call, in many rounds on each scheduler.

HELMSMAN_SOAK_ROUNDS sets the number of rounds per scheduler, HELMSMAN_SOAK_SEED the first seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.helpers import wait_until
from tests.hostile.kill_rounds import DAY_SEEDS, LEFT_S, Play, play

__all__ = ["play"]
pytestmark = pytest.mark.timeout(240)

NUM_ROUNDS = int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "6"))
FIRST_SEED = int(os.environ.get("HELMSMAN_SOAK_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + NUM_ROUNDS)


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed not in DAY_SEEDS])
def test_kill(play: Play, seed: int) -> None:
    play("local", seed)


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed % 3 == 0])
def test_kill_of_inline_driver(play: Play, seed: int) -> None:
    play("inline", seed)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster that outlives its drivers."""
    pytest.importorskip("ray")
    from tests.multinode.conftest import Nodes

    nodes = Nodes([{"num_cpus": 4}])
    yield nodes
    nodes.close()


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed % 3 == 1])
def test_kill_on_an_embedded_ray(play: Play, seed: int) -> None:
    pytest.importorskip("ray")
    play("ray", seed)


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed % 3 == 2])
def test_kill_on_a_cluster(play: Play, cluster: Any, seed: int) -> None:
    play("ray", seed, cluster.address)
    wait_until(
        lambda: cluster.free() == cluster.total(),
        "the cluster has its resources and placement groups back",
        limit_s=LEFT_S,
    )
