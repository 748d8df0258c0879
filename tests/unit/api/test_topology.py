"""Test that all views of the ranks' coordinates agree, in every order of the axes."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmsman.api.topology import AXES, DEFAULT_MESH, Axis, Topology

QUICK = settings(max_examples=25)
MESHES = list(itertools.permutations(AXES))
SUBSETS = [axes for count in range(len(AXES) + 1) for axes in itertools.permutations(AXES, count)]
TOPOLOGIES = st.builds(
    lambda sizes, mesh: Topology(**dict(zip(AXES, sizes, strict=True)), mesh=mesh),
    st.tuples(*[st.integers(1, 4)] * 4),
    st.sampled_from(MESHES),
)


@QUICK
@given(TOPOLOGIES)
def test_rank_at_and_rank_info_agree(topology: Topology) -> None:
    assert [info.rank for info in topology.ranks] == list(range(topology.world_size))
    assert (
        topology.world_size
        == topology.dp_size * topology.tp_size * topology.pp_size * topology.cp_size
    )
    for info in topology.ranks:
        assert topology.get_rank_info(info.rank) is info
        assert topology.rank_at(**{axis: info.along(axis) for axis in AXES}) == info.rank
        assert info.world_size == topology.world_size
        assert (info.dp_size, info.tp_size, info.pp_size, info.cp_size) == tuple(
            topology.sizes[axis] for axis in AXES
        )
        assert all(0 <= info.along(axis) < topology.sizes[axis] for axis in AXES)
        assert (info.is_pipeline_first_stage, info.is_pipeline_last_stage) == (
            info.pp_rank == 0,
            info.pp_rank == topology.pp_size - 1,
        )


@QUICK
@given(TOPOLOGIES, st.sampled_from(SUBSETS))
def test_part_of_first_axis_outermost(topology: Topology, axes: tuple[Axis, ...]) -> None:
    parts = [topology.part_of(rank, axes) for rank in range(topology.world_size)]
    assert topology.num_parts(axes) == math.prod(topology.sizes[axis] for axis in axes)
    assert sorted(set(parts)) == list(range(topology.num_parts(axes)))
    assert len({parts.count(part) for part in parts}) == 1, "each part has as many ranks"
    for info in topology.ranks:
        coordinates = [info.along(axis) for axis in axes]
        assert parts[info.rank] == (
            np.ravel_multi_index(coordinates, [topology.sizes[axis] for axis in axes])
            if axes
            else 0
        )


@QUICK
@given(TOPOLOGIES)
def test_rank_at_equals_device_mesh(topology: Topology) -> None:
    """torch.distributed.init_device_mesh lays out arange(world_size) in the shape of the mesh."""
    layout = np.arange(topology.world_size).reshape(
        [topology.sizes[axis] for axis in topology.mesh]
    )
    for position in np.ndindex(layout.shape):
        assert (
            topology.rank_at(**dict(zip(topology.mesh, position, strict=True))) == layout[position]
        )


def groups(topology: Topology, *axes: Axis) -> list[list[int]]:
    """Return the ranks that differ along these axes only."""
    others = [axis for axis in AXES if axis not in axes]
    found: dict[int, list[int]] = {}
    for rank in range(topology.world_size):
        found.setdefault(topology.part_of(rank, others), []).append(rank)
    return sorted(found.values())


def test_default_mesh_of_megatron() -> None:
    """Compare with the example of Megatron-LM's initialize_model_parallel: 16 devices, tensor 2,
    pipeline 4.
    """
    topology = Topology.of(16, tp=2, pp=4)
    assert groups(topology, "dp") == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
        [8, 10],
        [9, 11],
        [12, 14],
        [13, 15],
    ]
    assert groups(topology, "tp") == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [8, 9],
        [10, 11],
        [12, 13],
        [14, 15],
    ]
    assert groups(topology, "pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    # Megatron-LM's default order with context parallelism is tp-cp-ep-dp-pp, innermost first.
    topology = Topology.of(16, tp=2, cp=2, pp=2)
    assert topology.mesh == DEFAULT_MESH == ("pp", "dp", "cp", "tp")
    assert groups(topology, "cp") == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
        [8, 10],
        [9, 11],
        [12, 14],
        [13, 15],
    ]
    assert groups(topology, "dp") == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
        [8, 12],
        [9, 13],
        [10, 14],
        [11, 15],
    ]
    assert groups(topology, "dp", "cp") == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 10, 12, 14],
        [9, 11, 13, 15],
    ]


@QUICK
@given(TOPOLOGIES)
def test_topology_of_derives_dp_size(topology: Topology) -> None:
    sizes: Any = {axis: size for axis, size in topology.sizes.items() if axis != "dp"}
    assert Topology.of(topology.world_size, **sizes, mesh=topology.mesh).ranks == topology.ranks
    assert (
        Topology.of(topology.world_size, dp=topology.dp_size, **sizes, mesh=topology.mesh).ranks
        == topology.ranks
    )


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        (["dp"], "dp = 20 ranks / (tp 2 x pp 2 x cp 1)"),
        (["dp", "cp"], "dp x cp = 20 ranks / (tp 2 x pp 2)"),
        (["tp"], "tp = 20 ranks / (pp 2 x cp 1 x dp 5)"),
        (["dp", "tp", "pp", "cp"], "dp x tp x pp x cp = 20 ranks"),
        ([], "1 = 20 ranks / (tp 2 x pp 2 x cp 1 x dp 5)"),
    ],
)
def test_topology_derivation(axes: list[Axis], text: str) -> None:
    assert Topology(dp=5, tp=2, pp=2).derivation(axes) == text


def test_topology_table() -> None:
    lines = Topology(dp=2, tp=2).table().splitlines()
    assert lines[1].split() == ["1", "dp=0/2", "tp=1/2", "pp=0/1", "cp=0/1"]
    assert len(lines) == 4


def test_topology_plain_integers() -> None:
    topology = Topology(dp=np.int64(2))  # type: ignore[arg-type]
    assert type(topology.get_rank_info(np.int64(1)).dp_size) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Topology(dp=2.0), TypeError, "float"),  # type: ignore[arg-type]
        (lambda: Topology(dp=0), ValueError, "dp_size is 0; expected 1 or more"),
        (
            lambda: Topology(mesh=("dp", "tp")),
            ValueError,
            "mesh is ('dp', 'tp'); expected each of dp, tp, pp, cp once",
        ),
        (
            lambda: Topology(mesh=("dp", "dp", "tp", "pp")),
            ValueError,
            "expected each of dp, tp, pp, cp once, outermost first",
        ),
        (lambda: Topology(mesh="tp-cp-dp-pp"), ValueError, "mesh is 'tp-cp-dp-pp'; expected each"),  # type: ignore[arg-type]
        (lambda: Topology(mesh=("dp", 3, "tp", "pp")), ValueError, "mesh is ('dp', 3, 'tp', 'pp')"),  # type: ignore[arg-type]
        (lambda: Topology.of(0), ValueError, "world_size is 0; expected 1 or more"),
        (lambda: Topology.of(4, tp=0), ValueError, "tp_size is 0"),
        (lambda: Topology.of(4, dp=0), ValueError, "dp_size is 0"),
        (
            lambda: Topology.of(10, tp=2, pp=2),
            ValueError,
            "world_size is 10; tp 2 x pp 2 x cp 1 requires 8 or 12",
        ),
        (
            lambda: Topology.of(2, tp=4),
            ValueError,
            "world_size is 2; tp 4 x pp 1 x cp 1 requires 4",
        ),
        (
            lambda: Topology.of(16, dp=3, tp=4),
            ValueError,
            "world_size is 16; dp 3 x tp 4 x pp 1 x cp 1 requires 12",
        ),
        (lambda: Topology(dp=2).get_rank_info(2), IndexError, "rank is 2; expected 0 to 1"),
        (lambda: Topology(dp=2).get_rank_info(-1), IndexError, "rank is -1; expected 0 to 1"),
        (lambda: Topology(dp=2).rank_at(dp=2), IndexError, "dp is 2; expected 0 to 1"),
        (
            lambda: Topology(dp=2).rank_at(ddp=1),
            ValueError,
            "axes are ddp; expected some of dp, tp, pp, cp, each at most once",
        ),
        (lambda: Topology(dp=2).num_parts(["ep"]), ValueError, "axes are ep"),  # type: ignore[list-item]
        (lambda: Topology(dp=2).part_of(0, ["dp", "dp"]), ValueError, "axes are dp, dp"),
    ],
)
def test_topology_invalid_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()
