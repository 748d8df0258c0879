"""Tests of the dispatch of arguments to ranks and of the collection of results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helmsman.api.batch import Batch
from helmsman.api.columns import Ragged, same
from helmsman.api.dispatch import (
    AxisSharding,
    Collect,
    CustomDispatch,
    Dispatch,
    Execute,
    MethodSpec,
    Replicate,
    Shard,
    Unregistered,
)
from helmsman.api.errors import DispatchError, UnevenBatchError
from helmsman.api.register import register
from helmsman.api.topology import AXES, Axis, RankInfo, Topology
from helmsman.controller._groups.dispatch import (
    Cut,
    answering_ranks,
    collect,
    collecting_ranks,
    dispatch,
)

Work = Callable[..., Any]


def declared(
    mode: Any, function: Work | None = None, execute: Any = Execute.ALL, **options: Any
) -> MethodSpec:
    """Return the declaration of a method that takes ``x`` and further arguments."""

    def method(self: object, x: Any, y: Any = None, *rest: Any, z: Any = None, **more: Any) -> Any:
        raise NotImplementedError

    spec: MethodSpec = register(mode, execute, **options)(function or method).spec
    return spec


def unregistered(ranks: Sequence[int]) -> MethodSpec:
    """Return the specification of a call by name."""
    return MethodSpec(name="m", dispatch_mode=Unregistered(ranks))


def run(
    topology: Topology,
    spec: MethodSpec,
    work: Callable[[RankInfo, tuple[Any, ...], dict[str, Any]], Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Execute a call with ``work`` in place of the workers."""
    sent = dispatch(topology, spec, args, kwargs)
    results = {
        rank: work(
            topology.get_rank_info(rank),
            tuple(argument.for_rank(rank) for argument in sent.args),
            {name: argument.for_rank(rank) for name, argument in sent.kwargs.items()},
        )
        for rank in sent.ranks
    }
    return collect(
        topology,
        spec,
        sent.cut,
        [results[rank] for rank in answering_ranks(topology, spec, sent.ranks)],
    )


def first(info: RankInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Work that returns its argument."""
    return args[0]


TOPOLOGIES = [
    Topology(dp=1),
    Topology(dp=3),
    Topology(dp=2, tp=2),
    Topology(dp=2, tp=2, pp=2),
    Topology(dp=2, tp=2, pp=2, cp=2),
    Topology(dp=3, tp=2, pp=1, cp=2, mesh=("dp", "tp", "cp", "pp")),
]
SUBSETS = [subset for size in range(len(AXES) + 1) for subset in itertools.permutations(AXES, size)]
KINDS: dict[str, Callable[[int], Any]] = {
    "batch": lambda size: Batch(
        {"x": torch.arange(size), "name": [f"row {row}" for row in range(size)]}, {"lr": 0.1}
    ),
    "tensor": lambda size: torch.arange(size * 2).view(size, 2),
    "array": lambda size: np.arange(size),
    "list": lambda size: [f"row {row}" for row in range(size)],
    "ragged": lambda size: (
        Ragged(
            torch.arange(size * (size - 1) // 2),
            [row * (row - 1) // 2 for row in range(1, size + 1)],
        )
        if size
        else Ragged(torch.arange(0), [0])
    ),
}


@pytest.mark.parametrize(
    "topology", TOPOLOGIES, ids=lambda topology: "x".join(map(str, topology.sizes.values()))
)
def test_axis_sharding_of_each_rank(topology: Topology) -> None:
    for shard in SUBSETS:
        rest = [axis for axis in AXES if axis not in shard]
        parts = topology.num_parts(shard)
        sizes = {0, parts + 1, 3 * topology.world_size - 1}
        for size, replicate in itertools.product(sizes, (tuple(rest), tuple(rest[:1]), ())):
            check_shares(topology, shard, replicate, size)


def check_shares(
    topology: Topology, shard: tuple[Axis, ...], replicate: tuple[Axis, ...], size: int
) -> None:
    """Check that rows are cut as by numpy, over the axes in the order of their names."""
    given_to: dict[int, Any] = {}

    def work(info: RankInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given_to[info.rank] = args[0]
        return args[0]

    rows = list(range(size))
    assert (
        run(topology, declared(AxisSharding(shard, replicate), remainder="uneven"), work, rows)
        == rows
    )
    shares = np.array_split(np.arange(size), topology.num_parts(shard))
    for info in topology.ranks:
        number = 0
        for axis in shard:
            number = number * topology.sizes[axis] + info.along(axis)
        silent = any(info.along(axis) for axis in AXES if axis not in (*shard, *replicate))
        assert given_to[info.rank] == (None if silent else shares[number].tolist())


@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from(TOPOLOGIES),
    st.data(),
    st.sampled_from([Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST]),
)
def test_sharding_of_every_kind(
    kind: str, topology: Topology, data: st.DataObject, mode: Dispatch
) -> None:
    size = data.draw(st.integers(0, 3 * topology.world_size))
    rows = KINDS[kind](size)
    remainder = data.draw(st.sampled_from(["uneven", "pad"] if kind == "batch" else ["uneven"]))
    shares: dict[int, Any] = {}

    def work(info: RankInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0] is not None:
            shares[info.dp_rank] = args[0]
        return shares.get(info.dp_rank) if info.is_pipeline_last_stage else None

    joined = run(topology, declared(mode, remainder=remainder), work, rows)
    assert same(joined, rows)
    if remainder == "pad":
        assert len({len(share) for share in shares.values()}) == 1
        assert sum(int(share.mask.sum()) for share in shares.values()) == size


def test_dispatch_packs_one_object_for_many_ranks() -> None:
    topology = Topology(dp=2, tp=2)
    value = object()
    sent = dispatch(topology, declared(Dispatch.ONE_TO_ALL), (value,), {"z": value})
    assert [list(argument.parts) for argument in (*sent.args, sent.kwargs["z"])] == [
        [value],
        [value],
    ]
    rows = dispatch(topology, declared(Dispatch.DP_MP_COMPUTE), ([1, 2, 3, 4],), {}).args[0]
    assert rows.parts == [[1, 2], [3, 4]]
    assert list(rows.of_rank) == [0, 0, 1, 1]


@pytest.mark.parametrize("size", [1, 3, 4, 5])
def test_dispatch_of_a_list_as_long_as_the_world(size: int) -> None:
    topology = Topology(dp=2, tp=2)
    rows = list(range(size))
    assert run(topology, declared(Dispatch.ONE_TO_ALL), first, rows) == [rows] * 4
    assert run(topology, declared(Dispatch.ONE_TO_ALL_ONE), first, rows) == rows
    assert run(topology, declared(Dispatch.DP_MP_COMPUTE, remainder="uneven"), first, rows) == rows
    args = [rows, Replicate(rows), Shard(rows, remainder="uneven")]
    sent = dispatch(topology, unregistered(range(4)), args, {})
    assert [sent.args[index].for_rank(3) for index in range(3)] == [
        rows,
        rows,
        rows[(size + 1) // 2 :],
    ]


def test_dispatch_pipeline_ranks_that_return_nothing() -> None:
    def work(info: RankInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (
            Batch({"x": args[0]["x"] * 2, "rank": [info.rank] * len(args[0])})
            if info.is_pipeline_last_stage
            else None
        )

    for size in (0, 5, 10):
        joined = run(
            Topology(dp=5, tp=2, pp=2),
            declared(Dispatch.DP_MP_COMPUTE),
            work,
            Batch({"x": torch.arange(size)}),
        )
        assert joined["x"].tolist() == [2 * row for row in range(size)]
        assert joined["rank"] == [rank for rank in (10, 12, 14, 16, 18) for _ in range(size // 5)]


def test_dispatch_collect_all() -> None:
    topology = Topology(dp=2, tp=2, pp=2)
    got = run(topology, declared(Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL), first, ["a", "b"])
    assert got == [["a"], None, ["b"], None, None, None, None, None]


def test_execute_rank_zero() -> None:
    topology = Topology(dp=2, tp=2)
    for mode in (Dispatch.ONE_TO_ALL, Dispatch.ONE_TO_ALL_ONE):
        spec = declared(mode, execute=Execute.RANK_ZERO)
        assert list(dispatch(topology, spec, (1,), {}).ranks) == [0]
        assert run(
            topology, spec, lambda info, args, kwargs: (info.rank, args, kwargs), [1], z=2
        ) == (0, ([1],), {"z": 2})


def test_dispatch_all_to_all() -> None:
    topology = Topology(dp=2, tp=2)
    spec = declared(Dispatch.ALL_TO_ALL)
    assert run(
        topology,
        spec,
        lambda info, args, kwargs: (args, kwargs),
        [1, 2, 3, 4],
        z=("a", "b", "c", "d"),
    ) == [((number,), {"z": name}) for number, name in zip([1, 2, 3, 4], "abcd", strict=True)]
    for wrong, said in (
        ([1, 2, 3], "got 3 of them"),
        ("abcd", "got a str"),
        (torch.arange(4), "got a Tensor"),
    ):
        with pytest.raises(
            DispatchError,
            match=rf"method: argument 0 of an ALL_TO_ALL call .* each of 4 ranks; {said}",
        ):
            dispatch(topology, spec, (wrong,), {})


def test_custom_dispatch() -> None:
    topology = Topology(dp=2, tp=2)

    def spread(topology: Topology, value: int) -> tuple[list[Sequence[int]], dict[str, list[int]]]:
        return [range(value, value + topology.world_size)], {"z": [value] * topology.world_size}

    def last(topology: Topology, results: list[Any]) -> Any:
        return len(results), results[-1]

    for mode in ({"dispatch_fn": spread, "collect_fn": last}, CustomDispatch(spread, last)):
        assert run(topology, declared(mode), lambda info, args, kwargs: (args, kwargs), 10) == (
            4,
            ((13,), {"z": 10}),
        )
        zero = declared(mode, execute=Execute.RANK_ZERO)
        assert run(topology, zero, lambda info, args, kwargs: (args, kwargs), 10) == (
            1,
            ((10,), {"z": 10}),
        )


@pytest.mark.parametrize(
    "made", [None, [], ([],), ([[1]], {}), ([], {"z": [1, 2, 3]}), ([1], {}), (["abcd"], {})]
)
def test_custom_dispatch_refuses_invalid_results(made: Any) -> None:
    mode = CustomDispatch(lambda topology, value: made, lambda topology, results: results)
    with pytest.raises(
        DispatchError,
        match=r"its dispatch_fn returned .*expected \(args, kwargs\).*each of the 4 ranks",
    ):
        dispatch(Topology(dp=4), declared(mode), (1,), {})


def test_dispatch_refuses_marks() -> None:
    for mark in (Shard([1, 2]), Replicate([1, 2])):
        for args, kwargs in (((mark,), {}), ((), {"x": mark})):
            for mode in (Dispatch.ONE_TO_ALL, Dispatch.DP_MP_COMPUTE):
                with pytest.raises(
                    DispatchError,
                    match=rf"is a {type(mark).__name__}, but .* declaration .*: {mode.name}",
                ):
                    dispatch(Topology(dp=2), declared(mode), args, kwargs)


def test_dispatch_splits_the_named_parameters() -> None:
    topology = Topology(dp=2)
    spec = declared(Dispatch.DP_MP_COMPUTE, shard=("x", "z"))
    sent = dispatch(topology, spec, ([1, 2], [3, 4], [5, 6]), {"z": (7, 8), "w": [9, 10]})
    assert [argument.for_rank(1) for argument in sent.args] == [[2], [3, 4], [5, 6]]
    assert {name: argument.for_rank(1) for name, argument in sent.kwargs.items()} == {
        "z": [8],
        "w": [9, 10],
    }
    everything = dispatch(
        topology, declared(Dispatch.DP_MP_COMPUTE), ([1, 2], None, [5, 6]), {"w": [9, 10]}
    )
    assert [argument.for_rank(0) for argument in everything.args] == [[1], None, [5]]
    assert everything.kwargs["w"].for_rank(1) == [10]


def test_dispatch_refuses_arguments() -> None:
    def method(self: object, x: int) -> None:
        return None

    for mode in (Dispatch.ONE_TO_ALL, Dispatch.DP_MP_COMPUTE):
        with pytest.raises(TypeError, match=r"method\(x: 'int'\) -> 'None': too many positional"):
            dispatch(Topology(dp=2), declared(mode, method), (1, 2), {})


@pytest.mark.parametrize(
    ("topology", "rows", "derivation", "nearest"),
    [
        (Topology(dp=5, tp=2, pp=2), 7, "dp = 20 ranks / (tp 2 x pp 2 x cp 1) = 5", "5 and 10"),
        (Topology(dp=4), 3, "dp = 4 ranks / (tp 1 x pp 1 x cp 1) = 4", "4"),
    ],
)
def test_dispatch_of_rows_that_do_not_divide(
    topology: Topology, rows: int, derivation: str, nearest: str
) -> None:
    with pytest.raises(UnevenBatchError) as caught:
        dispatch(topology, declared(Dispatch.DP_MP_COMPUTE), (list(range(rows)),), {})
    text = str(caught.value)
    assert (
        f"argument 'x' of {rows} rows does not divide over {topology.dp_size} parts: "
        f"{derivation}; nearest" in text
    )
    assert f"nearest valid sizes: {nearest}." in text
    assert "remainder='pad'" in text and "remainder='uneven'" in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((0.5,), r"argument 'x' is split over dp, but a float has no rows"),
        (({"a": [1, 2]},), r"a dict has no rows"),
        ((torch.tensor(1.0),), r"a Tensor has no rows"),
        (
            ([1, 2], [1, 2, 3, 4]),
            r"the split arguments must have equal numbers of rows; got x: 2, y: 4",
        ),
    ],
)
def test_dispatch_of_values_without_rows(args: Sequence[Any], said: str) -> None:
    with pytest.raises(DispatchError, match=said):
        dispatch(Topology(dp=2), declared(Dispatch.DP_MP_COMPUTE), args, {})


@pytest.mark.parametrize("leaves_out", [False, True])
def test_padding_is_not_returned(leaves_out: bool) -> None:
    rows = KINDS["batch"](5)

    def work(info: RankInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        share = args[0].unpad() if leaves_out else args[0]
        return share["x"] + 100

    joined = run(
        Topology(dp=4, tp=2), declared(Dispatch.DP_MP_COMPUTE, remainder="pad"), work, rows
    )
    assert joined.tolist() == [100, 101, 102, 103, 104]


def test_padding_of_the_caller_stays() -> None:
    rows = KINDS["batch"](3).pad(4)
    joined = run(Topology(dp=2), declared(Dispatch.DP_MP_COMPUTE), first, rows)
    assert joined.equals(rows) and joined.num_padding == 1
    spec = declared(Dispatch.DP_MP_COMPUTE, remainder="pad")
    with pytest.raises(
        DispatchError,
        match="a part of 2 rows, 1 of them padding, returned 4 rows, so the padding rows",
    ):
        run(
            Topology(dp=2), spec, lambda info, args, kwargs: [*args[0], *args[0]], KINDS["batch"](3)
        )
    with pytest.raises(
        DispatchError, match=r"has 3 rows for 2 parts and is a list, which cannot carry the mask"
    ):
        dispatch(Topology(dp=2), spec, ([1, 2, 3],), {})
    assert run(Topology(dp=2), spec, first, [1, 2]) == [1, 2]


@pytest.mark.parametrize(
    "results",
    [[1.5, 2], [{"loss": 1.0}, {"loss": 2.0}], ["a", "b"], [torch.tensor(1.0)] * 2, [None, 3]],
)
@pytest.mark.parametrize("cut", [None, Cut([2, 2], [0, 1])])
def test_collect_results_without_rows(results: list[Any], cut: Cut | None) -> None:
    spec = declared(Dispatch.DP_MP_COMPUTE)
    assert collect(Topology(dp=2), spec, cut, results) == results


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (
            [({"loss": 1.0}, 2), ({"loss": 2.0}, 2)],
            r"its parts returned tuple, which cannot be joined. .*collect=Collect.LIST",
        ),
        ([[1], 2.0], r"its parts returned list and float"),
        ([[1], None], r"its parts returned list and NoneType"),
        ([torch.zeros(1), [1]], r"its parts returned tensor and list"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], r"the results of its parts cannot be joined"),
        (
            [Batch({"x": [1]}), Batch({"y": [1]})],
            r"cannot be joined: batch 1 has the columns y; the first has x",
        ),
    ],
)
def test_collect_refuses(results: list[Any], said: str) -> None:
    with pytest.raises(DispatchError, match=said):
        collect(Topology(dp=2), declared(Dispatch.DP_MP_COMPUTE), None, results)


def test_collecting_ranks() -> None:
    topology = Topology(dp=2, tp=3, pp=2)
    assert collecting_ranks(topology, AxisSharding(("dp",), (), {"tp": -1, "pp": 1})) == [
        topology.rank_at(dp=dp, tp=2, pp=1) for dp in range(2)
    ]
    with pytest.raises(
        DispatchError,
        match="coordinate 3 of tp, which has size 3. Use a coordinate from 0 to 2",
    ):
        collecting_ranks(topology, AxisSharding(("dp",), (), {"tp": 3}))


def test_axis_sharding_to_another_coordinate() -> None:
    topology = Topology(dp=2, tp=2, pp=3)
    spec = declared(AxisSharding(("dp",), ("tp",), {"pp": -1}, {"pp": -1}))
    given_to = dispatch(topology, spec, ([1, 2],), {}).args[0]
    assert [given_to.for_rank(info.rank) for info in topology.ranks] == [
        [info.dp_rank + 1] if info.is_pipeline_last_stage else None for info in topology.ranks
    ]
    assert run(topology, spec, first, [1, 2]) == [1, 2]
    with pytest.raises(
        DispatchError, match="rows are given to coordinate 3 of pp, which has size 3"
    ):
        dispatch(topology, declared(AxisSharding(("dp",), (), {}, {"pp": 3})), ([1, 2],), {})


@pytest.mark.parametrize(
    ("collect", "expected"),
    [(Collect.LIST, [(0, 3), (2, 2), (4, 2)]), (len, 3), (Collect.JOIN, None)],
)
def test_collect(collect: Any, expected: Any) -> None:
    def work(info: RankInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if collect is Collect.JOIN else (info.rank, len(args[0]))

    spec = declared(Dispatch.DP_MP_COMPUTE, collect=collect, remainder="uneven")
    assert run(Topology(dp=3, tp=2), spec, work, list(range(7))) == expected


def test_unregistered_shard_for_one_rank() -> None:
    with pytest.raises(
        DispatchError, match="argument 0 is a Shard, and the call goes to rank 2 alone"
    ):
        dispatch(Topology(dp=4), unregistered([2]), [Shard([1, 2, 3, 4])], {})
    for topology in (Topology(), Topology(tp=2)):  # with a single share
        assert dispatch(topology, unregistered([0]), [Shard([1, 2])], {}).args[0].for_rank(0) == [
            1,
            2,
        ]


@pytest.mark.parametrize("execute", list(Execute))
@pytest.mark.parametrize(
    "mode",
    [*Dispatch, AxisSharding(), AxisSharding(()), {"dispatch_fn": print, "collect_fn": print}],
)
def test_register_modes_that_go_together(mode: Any, execute: Execute) -> None:
    goes = (
        execute is Execute.ALL
        or mode in (Dispatch.ONE_TO_ALL, Dispatch.ONE_TO_ALL_ONE)
        or isinstance(mode, dict)
    )
    if goes:
        assert declared(mode, execute=execute).execute_mode is execute
    else:
        with pytest.raises(DispatchError, match="RANK_ZERO would drop all but the first"):
            declared(mode, execute=execute)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dispatch_mode": "dp"}, "'dp' is not a dispatch mode"),
        (
            {"dispatch_mode": {"dispatch_fn": print}},
            r"has the functions 'dispatch_fn' and 'collect_fn'; got \['dispatch_fn'\]",
        ),
        (
            {"dispatch_mode": Dispatch.DP_MP_COMPUTE, "execute_mode": "all"},
            "'all' is not an execute mode",
        ),
        (
            {"dispatch_mode": Dispatch.DP_MP_COMPUTE, "shard": "x"},
            r"Give the names of parameters: shard=\('x',\)",
        ),
        (
            {"dispatch_mode": Dispatch.DP_MP_COMPUTE, "shard": ("w",)},
            "shard contains 'w', but the method's parameters are 'more', 'rest', 'x'",
        ),
        (
            {"dispatch_mode": Dispatch.DP_MP_COMPUTE, "remainder": "drop"},
            "remainder is 'drop'. Give 'error', 'pad' or 'uneven'",
        ),
        ({"dispatch_mode": Dispatch.ONE_TO_ALL, "shard": ("x",)}, "ONE_TO_ALL does not split"),
        ({"dispatch_mode": Dispatch.ONE_TO_ALL, "remainder": "pad"}, "ONE_TO_ALL does not split"),
        (
            {"dispatch_mode": Dispatch.ONE_TO_ALL, "collect": Collect.LIST},
            "cannot be combined with ONE_TO_ALL",
        ),
        (
            {"dispatch_mode": Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL, "collect": Collect.JOIN},
            "cannot be combined with",
        ),
    ],
)
def test_register_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(
        DispatchError, match="Use it as a decorator with arguments on a plain method"
    ):
        register(Dispatch.ONE_TO_ALL)(staticmethod(print))  # type: ignore[arg-type]
    with pytest.raises(DispatchError, match=said):
        declared(
            options.pop("dispatch_mode"),
            execute=options.pop("execute_mode", Execute.ALL),
            **options,
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((("ep",),), "there is no axis 'ep'"),
        ((("dp",), ("dp",)), "an axis is named twice"),
        ((("dp", "dp"),), "named twice"),
        (
            (("dp",), (), {"dp": 0}),
            "take and shard both contain dp; expected only axes that are not split",
        ),
        (
            (("dp",), None, {}, {"tp": 1}),
            "give contains tp; expected axes that are neither split nor replicated",
        ),
    ],
)
def test_axis_sharding_refuses(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AxisSharding(*arguments)
