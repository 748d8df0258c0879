"""Test that ranks follow the order of devices."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from helmsman.api.scheduler import SchedulingSpec
from helmsman.controller._placement.placement import Placement, in_device_order


@given(st.integers(1, 12), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_in_device_order(replicas: int, num_nodes: int, alike: bool, rng: random.Random) -> None:
    tasks = [SchedulingSpec(gpu=1, mem=0 if alike else index % 2) for index in range(replicas)]
    ids = [str(index) for index in range(16)]
    rng.shuffle(ids)
    places = [
        Placement(
            node_id=f"n{rng.randrange(num_nodes)}",
            node="n",
            devices=(ids[index],),
            positions=(int(ids[index]),),
        )
        for index in range(replicas)
    ]
    order = in_device_order(tasks, places)
    assert sorted(order) == list(range(replicas))
    for rank, origin in enumerate(order):
        assert places[rank].node_id == places[origin].node_id
        assert tasks[rank] == tasks[origin]
    if alike:
        for node in {place.node_id for place in places}:
            on_node = [
                places[origin].devices[0] for origin in order if places[origin].node_id == node
            ]
            assert on_node == sorted(on_node, key=int)
