"""Tests of tile: the devices of its target that each replica receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmsman.api.errors import InvalidSpecError
from helmsman.api.plan import PlannedWorker
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.controller._placement.placement import tile


def _target(replicas: int, gpu: int, per_node: int) -> list[PlannedWorker]:
    """Return workers with ``gpu`` devices each, ``per_node`` of them on a node."""
    return [
        PlannedWorker(
            worker_id=f"target/{index}",
            node_id=f"n{index // per_node}",
            node=f"10.0.0.{index // per_node}",
            num_devices=gpu,
            devices=tuple(str(index % per_node * gpu + device) for device in range(gpu)),
        )
        for index in range(replicas)
    ]


def _job(
    replicas: int, fork: bool = True, mapping: Sequence[Sequence[int]] = (), **spec: Any
) -> Job:
    strategy = SchedulingStrategy(
        type="colocation", target="target", fork=fork, device_mapping=mapping
    )
    return Job(
        role="r", replicas=replicas, tasks=[SchedulingSpec(**spec)], scheduling_strategy=strategy
    )


def test_tile_servers_over_more_trainers() -> None:
    shares = tile(_job(16, gpu=4), _target(64, 1, per_node=8))
    assert [ranks for ranks, _ in shares] == [
        tuple(range(4 * index, 4 * index + 4)) for index in range(16)
    ]
    assert [share.devices for _, share in shares[:3]] == [
        ("0", "1", "2", "3"),
        ("4", "5", "6", "7"),
        ("0", "1", "2", "3"),
    ]
    assert [share.node_id for _, share in shares[::2]] == [f"n{index}" for index in range(8)]


def test_tile_trainers_over_fewer_servers() -> None:
    shares = tile(_job(64, gpu=1), _target(16, 4, per_node=2))
    assert [share.devices for _, share in shares[:8]] == [(str(index),) for index in range(8)]
    assert [ranks for ranks, _ in shares[:8]] == [(0,)] * 4 + [(1,)] * 4


@given(st.integers(1, 16), st.integers(1, 48), st.integers(0, 8), st.booleans())
def test_tile_shares_every_device_equally(
    targets: int, replicas: int, gpu: int, fork: bool
) -> None:
    target = _target(targets, gpu, per_node=16)
    if not (
        targets % replicas == 0
        or (fork and replicas % targets == 0 and gpu % (replicas // targets) == 0)
    ):
        with pytest.raises(InvalidSpecError):
            tile(_job(replicas, fork), target)
        return
    shares = tile(_job(replicas, fork), target)
    assert len(shares) == replicas
    for ranks, share in shares:
        assert share.num_devices == len(share.devices)
        assert {target[rank].node_id for rank in ranks} == {share.node_id}
    if fork:
        assert sorted(int(device) for _, share in shares for device in share.devices) == list(
            range(targets * gpu)
        )


def test_tile_counts_unknown_devices() -> None:
    target = [
        PlannedWorker(worker_id=f"target/{index}", node_id="n", node="n", num_devices=2)
        for index in range(2)
    ]
    ((_, share),) = tile(_job(1), target)
    assert (share.num_devices, share.devices) == (4, ())


@pytest.mark.parametrize(
    ("job", "target", "message"),
    [
        (
            _job(3),
            _target(4, 1, 4),
            r"replicas is 3; expected a divisor or a multiple of the 4 workers of 'target'",
        ),
        (_job(8, fork=False), _target(4, 1, 4), r"expected a divisor of the 4 workers"),
        (
            _job(1),
            _target(4, 1, 2),
            (
                r"replica 0 would share devices with target/0 to target/3, which are on 10.0.0.0, "
                r"10.0.0.1"
            ),
        ),
        (
            _job(8),
            _target(4, 3, 4),
            r"divides the 3 devices of target/0 evenly; 2 replicas would share them",
        ),
        (
            _job(2, gpu=1),
            _target(4, 1, 4),
            r"gpu of replica 0 is 1; expected 2, its share",
        ),
        (_job(4, fork=False, gpu=2), _target(4, 1, 4), r"gpu of replica 0 is 2; expected 1"),
        (
            _job(1, mapping=[[0, 4]]),
            _target(4, 1, 4),
            r"expected devices that 'target' has, which are only 0 to 3",
        ),
        (
            _job(2, mapping=[[0, 1], [1, 2]]),
            _target(4, 1, 2),
            (
                r"device_mapping\[1\] is \[1, 2\]; expected devices of one node; device "
                r"1 on 10.0.0.0, 2 on 10.0.0.1"
            ),
        ),
    ],
)
def test_tile_rejects(job: Job, target: list[PlannedWorker], message: str) -> None:
    with pytest.raises(InvalidSpecError, match=message):
        tile(job, target)
