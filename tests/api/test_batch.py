"""Test that operations on a batch equal those on its rows, and that slices are views."""

from __future__ import annotations

import copy
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helmsman._wire.codec import decode, encode
from helmsman.api.batch import Batch
from helmsman.api.columns import Ragged, same
from helmsman.api.errors import UnevenBatchError
from helmsman.api.parts import PerPart, join_meta
from tests.api.columns import QUICK, ROWS, columns, pickles_as_it_is

METAS: list[dict[str, Any]] = [
    {},
    {"loss": math.nan, "scale": torch.tensor([1, torch.nan]), "names": ["a", "b"]},
]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw batches with columns of every kind, or none."""
    num_rows = draw(ROWS)
    drawn = draw(st.dictionaries(st.sampled_from("abcd"), columns(num_rows), max_size=4))
    return Batch(drawn, draw(st.sampled_from(METAS)), num_rows=num_rows)


def memory_of(column: Any) -> int | None:
    """Return the id of a column's memory; None for a list and for columns without elements."""
    values = column.values if isinstance(column, Ragged) else column
    if isinstance(values, list) or 0 in values.shape:
        return None
    if isinstance(values, torch.Tensor):
        return values.untyped_storage().data_ptr()
    while values.base is not None:
        values = values.base
    return id(values)


def is_view(part: Batch, whole: Batch) -> bool:
    return all(
        memory_of(column) in (None, memory_of(whole[name])) for name, column in part.columns.items()
    )


# --- operations -----------------------------------------------------------------------------------


@QUICK
@given(batches(), st.data())
def test_batch_operations_equal_rows(batch: Batch, data: st.DataObject) -> None:
    rows, size = list(batch), len(batch)
    part, times = data.draw(st.slices(30)), data.draw(st.integers(0, 3))
    numbers = data.draw(st.lists(st.integers(-size, size - 1), max_size=40)) if size else []
    flags = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    order = data.draw(st.permutations(range(size)))
    taken = [rows[number] for number in numbers]
    masked = [row for row, flag in zip(rows, flags, strict=True) if flag]
    cases: list[tuple[Batch, Sequence[Any]]] = [
        (batch[part], rows[part]),
        *(
            (batch.take(given), taken)
            for given in (numbers, tuple(numbers), np.array(numbers, "i4"), torch.tensor(numbers))
        ),
        *(
            (batch.take(mask), masked)
            for mask in (flags, np.array(flags, bool), torch.tensor(flags, dtype=torch.bool))
        ),
        (batch.reorder(order), [rows[number] for number in order]),
        (batch.repeat(times), [row for row in rows for _ in range(times)]),
        (batch.repeat(times, interleave=False), rows * times),
        (Batch.concat([batch, batch[part], batch]), [*rows, *rows[part], *rows]),
    ]
    for made, expected in cases:
        assert same(list(made), expected)
        assert len(made) == len(expected)
        assert same(dict(made.meta), dict(batch.meta))
    assert part.step not in (None, 1) or is_view(batch[part], batch)
    assert not any(
        memory_of(column) == memory_of(batch[name]) is not None
        for name, column in cases[1][0].columns.items()
    )
    assert batch.reorder(order).reorder(np.argsort(np.array(order, dtype=int))).equals(batch)


@QUICK
@given(batches(), st.integers(1, 9), st.sampled_from(["error", "pad", "uneven"]))
def test_batch_chunk_and_concat(batch: Batch, num_chunks: int, remainder: Any) -> None:
    if remainder == "error" and len(batch) % num_chunks:
        with pytest.raises(UnevenBatchError):
            batch.chunk(num_chunks, remainder)
        return
    chunks = batch.chunk(num_chunks, remainder)
    sizes = [len(chunk) for chunk in chunks]
    assert len(chunks) == num_chunks
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= (remainder == "uneven")
    assert Batch.concat(chunks).equals(batch if remainder == "uneven" else batch.pad(num_chunks))
    assert all(is_view(chunk, batch) for chunk in chunks if not chunk.num_padding)
    parts = batch.unpad().split(np.array([len(chunk.unpad()) for chunk in chunks]))  # type: ignore[arg-type]
    assert all(
        part.equals(chunk.unpad()) and is_view(part, batch)
        for part, chunk in zip(parts, chunks, strict=True)
    )


@QUICK
@given(batches(), st.integers(1, 9), st.integers(1, 9), st.slices(40))
def test_batch_pad_and_unpad(batch: Batch, first: int, second: int, part: slice) -> None:
    padded = batch.pad(first)
    assert padded is batch or len(batch) % first
    for each in (padded, padded.pad(second), *padded.chunk(second, "pad")):
        real = len(each) - each.num_padding
        assert list(map(bool, each.mask)) == [True] * real + [False] * each.num_padding
        assert all(same(each[row], batch[-1]) for row in range(real, len(each)))
        assert len(each.unpad()) == real
    assert len(padded.pad(second)) % second == 0
    assert padded.pad(second).unpad().equals(batch)
    assert (
        sum(chunk.num_padding for chunk in padded.chunk(second, "pad"))
        == padded.pad(second).num_padding
    )
    part = slice(part.start, part.stop)
    assert list(map(bool, padded[part].mask)) == list(map(bool, padded.mask))[part]


@QUICK
@given(batches(), st.data())
def test_batch_group_by_rows_in_order(batch: Batch, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch)))
    for column in (
        keys,
        torch.tensor(keys, dtype=torch.uint8),
        np.array(keys, "f2"),
        np.array(keys, "U1").astype(object),
    ):
        keyed = batch.with_columns(key=column)
        groups = keyed.group_by("key")
        assert list(map(int, groups)) == list(dict.fromkeys(keys))
        for key, group in groups.items():
            assert group.equals(
                keyed.take([row for row, its in enumerate(keys) if its == int(key)])
            )
            assert keys != sorted(keys) or is_view(group, keyed)
        by_function = keyed.group_by(lambda row: int(row["key"]))
        assert all(
            same(list(group), list(groups[key]))
            for key, group in zip(groups, by_function.values(), strict=True)
        )


def test_batch_group_by_nan() -> None:
    groups = Batch({"a": torch.tensor([math.nan, 1.0, math.nan])}).group_by("a")
    assert [len(group) for group in groups.values()] == [2, 1]


@QUICK
@given(batches(), st.data())
def test_batch_select_and_union(batch: Batch, data: st.DataObject) -> None:
    names = data.draw(st.permutations(list(batch.columns)))
    at = data.draw(st.integers(0, len(names)))
    selected, rest = batch.select(*names[:at]), batch.select(*names[at:])
    assert list(selected.columns) == names[:at]
    assert len(selected) == len(rest) == len(batch)
    assert rest.union(selected).union(batch).equals(selected.union(rest)) and rest.union(
        selected
    ).equals(batch)
    assert all(selected[name] is batch[name] for name in selected.columns)


@QUICK
@given(batches(), st.integers(1, 5))
def test_batch_pickles(batch: Batch, multiple: int) -> None:
    native = batch.select(
        *(name for name, column in batch.columns.items() if pickles_as_it_is(column))
    ).pad(multiple)
    for each in (native, native[len(native) // 2 :]):
        pickled = [pickle.loads(pickle.dumps(each, protocol)) for protocol in (2, 5)]
        for restored in (
            *pickled,
            decode(encode(each)),
            decode(encode(each, inband_below=0)),
            copy.copy(each),
        ):
            assert type(restored) is Batch
            assert restored.equals(each)


# --- bytes and devices ----------------------------------------------------------------------------


@pytest.fixture
def wide() -> Batch:
    """Return a batch with 8 KB per row."""
    return Batch(
        {
            "tensor": torch.arange(100 * 256).reshape(100, 256),
            "bf16": torch.zeros(100, 1024, dtype=torch.bfloat16, requires_grad=True),
            "array": np.zeros((100, 256)),
            "ragged": Ragged(torch.zeros(100 * 256), range(0, 100 * 256 + 1, 256)),
            "ragged_array": Ragged(np.zeros(100 * 128), range(0, 100 * 128 + 1, 128)),
        }
    )


@pytest.mark.parametrize(
    "num_bytes", [lambda value: len(pickle.dumps(value)), lambda value: encode(value).nbytes]
)
def test_batch_slice_num_bytes(wide: Batch, num_bytes: Callable[[Any], int]) -> None:
    for part in (wide[10:15], {"deep": [wide[10:15]]}):
        assert num_bytes(part) < 5 * 8192 + 4000
    assert num_bytes(wide) > 100 * 8192


def test_batch_slice_encoded_without_copy(wide: Batch) -> None:
    part = wide[10:15]
    found = [
        np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        for buffer in encode(part).buffers
    ]
    dense = [
        column.values if isinstance(column, Ragged) else column for column in part.columns.values()
    ]
    expected = [
        each.data_ptr() if isinstance(each, torch.Tensor) else each.__array_interface__["data"][0]  # type: ignore[union-attr]
        for each in dense
    ]
    assert sorted(found) == sorted(expected), "one for each column; offsets go in the stream"


def test_batch_columns_keep_device() -> None:
    """Columns stay on their device (here meta), and offsets on the host."""
    values = torch.zeros(5, 2, device="meta")
    batch = Batch({"t": values[:3], "r": Ragged(values, [0, 2, 2, 5])})
    groups = batch.group_by(lambda row: len(row["r"])).values()
    for made in (
        batch[1:],
        batch.take(torch.tensor([2, 0])),
        Batch.concat(batch.chunk(2, "pad")).unpad(),
        *groups,
    ):
        assert (made["t"].device.type, made["t"].shape[1:]) == ("meta", (2,))
        assert (made["r"].values.device.type, made["r"].offsets.device.type) == ("meta", "cpu")
        assert len(made["r"].values) == sum(map(len, made["r"]))


@pytest.mark.parametrize(
    ("columns", "mask"),
    [
        ({"l": [1], "a": np.zeros(1), "t": torch.zeros(1)}, torch.tensor([True, False])),
        ({"l": [1], "r": Ragged(torch.zeros(1), [0, 1])}, torch.tensor([True, False])),
        ({"l": [1], "a": np.zeros(1)}, np.array([True, False])),
        ({"l": [1], "r": Ragged(np.zeros(1), [0, 1])}, np.array([True, False])),
        ({"l": [1]}, [True, False]),
        ({"m": torch.zeros(1, device="meta")}, torch.empty(2, dtype=torch.bool, device="meta")),
    ],
)
def test_batch_mask_kind(columns: Any, mask: Any) -> None:
    found = Batch(columns).pad(2).mask
    assert type(found) is type(mask)
    assert getattr(found, "device", None) == getattr(mask, "device", None)
    assert getattr(mask, "is_meta", False) or same(found, mask)


# --- frozen ---------------------------------------------------------------------------------------


def test_batch_is_frozen() -> None:
    batch = Batch({"a": [1]}, {"m": 1})
    for name in ("columns", "extra"):
        with pytest.raises(AttributeError, match=f"a Batch is frozen; {name!r} cannot be set"):
            setattr(batch, name, {})
    with pytest.raises(AttributeError, match="a Batch is frozen; 'meta' cannot be deleted"):
        del batch.meta
    for mapping in (batch.columns, batch.meta, batch):
        with pytest.raises(TypeError):
            mapping["a"] = [2]  # type: ignore[index]


def test_batch_copies_lists_and_dicts() -> None:
    prompts, meta = ["a", "b"], {"step": 1}
    columns: dict[str, Any] = {"prompt": prompts}
    batch = Batch(columns, meta)
    prompts.clear()
    columns["other"] = []
    meta["step"] = 2
    assert (dict(batch.columns), dict(batch.meta)) == ({"prompt": ["a", "b"]}, {"step": 1})


def test_batch_with_columns() -> None:
    batch = Batch({"a": [1, 2]}, {"m": 1}).pad(3)
    changed = batch.with_columns(a=(3, 4, 5), b=torch.zeros(3))
    assert (list(changed.columns), changed["a"]) == (["a", "b"], [3, 4, 5])
    assert (dict(changed.meta), changed.num_padding) == ({"m": 1}, 1)
    assert (list(batch.columns), batch["a"], dict(batch.meta)) == (["a"], [1, 2, 2], {"m": 1})


# --- meta -----------------------------------------------------------------------------------------


def test_join_meta_differences_per_part() -> None:
    metas: list[dict[str, Any]] = [
        {
            "same": torch.tensor([1.0, torch.nan]),
            "nan": math.nan,
            "step": 1,
            "first": 1,
            "none": None,
        },
        {"same": torch.tensor([1.0, torch.nan]), "nan": float("nan"), "step": 2, "second": 2},
    ]
    joined = Batch.concat([Batch({"a": [1]}, meta) for meta in metas]).meta
    assert list(joined) == ["same", "nan", "step", "first", "none", "second"]
    assert joined["same"] is metas[0]["same"] and math.isnan(joined["nan"])
    per_part = [joined[name] for name in ("step", "first", "none", "second")]
    assert same(
        per_part, [PerPart((1, 2)), PerPart((1, None)), PerPart((None, None)), PerPart((None, 2))]
    )


def test_join_meta_nested() -> None:
    batch = Batch.concat([Batch({"a": [part]}, {"step": part}) for part in range(2)])
    assert type(decode(encode(batch)).meta["step"]) is PerPart
    assert Batch.concat(batch.chunk(2)).meta["step"] == PerPart((0, 1))
    other = Batch({"a": [0]}, {"step": 2})
    assert Batch.concat([batch, other]).meta["step"] == PerPart((PerPart((0, 1)), 2))
    assert join_meta([{"a": (1, 2)}, {"a": PerPart((1, 2))}])["a"] == PerPart(
        ((1, 2), PerPart((1, 2)))
    )


# --- contents -------------------------------------------------------------------------------------


def test_batch_rows() -> None:
    batch = Batch(
        {"x": torch.tensor([[1, 2], [3, 4]]), "r": Ragged(np.arange(3), [0, 1, 3]), "t": ["a", "b"]}
    )
    numbers: list[Any] = [1, -1, np.int64(1), torch.tensor(1), np.array(1)]
    for row in (*(batch[number] for number in numbers), list(batch)[1]):
        assert same(row, {"x": torch.tensor([3, 4]), "r": np.array([1, 2]), "t": "b"})
    assert "x" in batch and "y" not in batch and 0 not in batch


def test_batch_without_rows() -> None:
    batch = Batch({})
    assert len(batch) == 0 and batch
    assert [len(chunk) for chunk in batch.chunk(3)] == [0, 0, 0]
    assert batch.pad(4) is batch
    assert batch.repeat(2).equals(batch)
    assert batch.group_by(lambda row: 1) == {}
    assert list(Batch({}, num_rows=2)) == [{}, {}]


def test_batch_repr_and_to_dict() -> None:
    batch = Batch(
        {
            "x": torch.zeros(2, 3),
            "a": np.zeros(2),
            "t": ["a", "b"],
            "r": Ragged(np.arange(3), [0, 1, 3]),
        },
        {"k": 1},
    )
    assert repr(batch.pad(3)) == (
        "Batch(3 rows (1 of them padding), x: (3, 3) torch.float32, a: (3,) float64, t: list, "
        "r: Ragged(3 rows, values (5,) int64), meta: k)"
    )
    assert repr(Batch({}, num_rows=2)) == "Batch(2 rows, no columns)"
    assert Batch({"a": [1, 2, 3]}, {"m": 1}).pad(2).to_dict() == {"a": [1, 2, 3]}, (
        "without meta and padding"
    )


def test_batch_equals() -> None:
    def nested(value: float) -> Batch:
        return Batch(
            {"turns": [Batch({"a": torch.tensor([value])})]},
            {"prompt": Batch({"a": np.array([value])})},
        )

    assert nested(math.nan).equals(nested(math.nan)) and not nested(1).equals(nested(2))
    assert decode(encode(nested(1))).equals(nested(1))
    batch = Batch({"a": [1, 1]}, {"m": 1})
    assert batch.equals(Batch(MappingProxyType({"a": (1, 1)}), MappingProxyType({"m": 1})))
    changed = [
        batch.with_columns(a=[1, 2]),
        batch.with_columns(b=[1, 2]),
        batch.with_columns(a=torch.ones(2)),
    ]
    for other in (
        *changed,
        Batch({"a": [1, 1]}, {"m": 2}),
        batch[:1],
        batch[:1].pad(2),
        batch.to_dict(),
    ):
        assert not batch.equals(other)


def test_batch_counts_may_be_numpy_integers() -> None:
    batch = Batch({}, num_rows=np.int64(4))  # type: ignore[arg-type]
    assert type(len(batch)) is int
    assert [len(chunk) for chunk in batch.chunk(np.int64(3), "pad")] == [2, 2, 2]  # type: ignore[arg-type]
    assert len(batch.repeat(np.int64(2)).pad(np.int64(3))) == 9  # type: ignore[arg-type]


def test_batch_of_lists_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from helmsman.api.batch import Batch\n"
        "batch = Batch({'a': [1, 2, 3], 'b': ['x', 'y', 'x']})\n"
        "batch = Batch.concat(batch.pad(2).chunk(2)).unpad().reorder([2, 0, 1]).repeat(2)\n"
        "assert list(batch.group_by('b')) == ['x', 'y'] and batch.take(batch.mask).equals(batch)\n"
        "assert not {'torch', 'numpy', 'tensordict'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- errors ---------------------------------------------------------------------------------------

TWO = Batch({"a": [1, 2]}, {"m": 1})
PADDED = TWO.pad(3)


def one(column: Any) -> Batch:
    return Batch({"a": column}, {"m": 1})


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: one(1),
        TypeError,
        "column 'a' is a int; a column is a tensor or array with at least one dimension",
    ),
    (lambda: one(torch.tensor(1)), TypeError, "column 'a' is a tensor or array without dimensions"),
    (lambda: one(np.ma.array([1])), TypeError, "column 'a' is a MaskedArray;"),
    (
        lambda: one(torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)),
        TypeError,
        "column 'a' is a nested tensor; make a Ragged of its values() and offsets()",
    ),
    (lambda: Batch({1: [1]}), TypeError, "names of columns are strings, not 1"),  # type: ignore[dict-item]
    (
        lambda: Batch({"a": [1], "b": [1, 2]}),
        ValueError,
        "the columns of a batch must have equal numbers of rows; got a: 1, b: 2",
    ),
    (lambda: Batch({"a": [1]}, num_rows=2), ValueError, "got a: 1, num_rows: 2"),
    (lambda: Batch({}, num_rows=-1), ValueError, "num_rows is -1; expected 0 or more"),
    (lambda: Batch({}, num_rows=1.0), TypeError, "float"),  # type: ignore[arg-type]
    (lambda: TWO.with_columns(b=[1]), ValueError, "got a: 2, b: 1, num_rows: 2"),
    (lambda: TWO["b"], KeyError, "no column 'b'; there are a"),
    (lambda: TWO[2], IndexError, "row 2 does not exist; there are 2 rows"),
    *(
        ((lambda key=key: TWO[key]), TypeError, f"expected an integer, got {shown}")  # type: ignore[misc]
        for key, shown in [
            (True, "True"),
            (np.True_, "True"),
            (torch.tensor(True), "True"),
            (1.5, "1.5"),
            (None, "None"),
        ]
    ),
    (lambda: TWO.take([0, 2]), IndexError, "row 2 does not exist; there are 2 rows"),
    (lambda: TWO.take([True]), IndexError, "the mask has 1 entries for 2 rows"),
    (lambda: TWO[::0.5], TypeError, "slice indices must be integers"),
    (
        lambda: TWO.reorder([0, 0]),
        ValueError,
        "expected a permutation of the 2 rows, each exactly once; got 2 indices: 0, 0",
    ),
    (
        lambda: TWO.reorder([0, 2]),
        ValueError,
        "expected a permutation of the 2 rows, each exactly once: row 2 does not",
    ),
    (lambda: TWO.repeat(-1), ValueError, "times is -1; expected 0 or more"),
    (lambda: TWO.split([1, 2]), ValueError, "sizes [1, 2] add up to 3, and there are 2 rows"),
    (lambda: TWO.split([3, -1]), ValueError, "a part has -1 rows; expected 0 or more"),
    (lambda: TWO.chunk(0), ValueError, "num_parts is 0; expected 1 or more"),
    (lambda: TWO.chunk(0, "pad"), ValueError, "num_chunks is 0; expected 1 or more"),
    (
        lambda: TWO.chunk(2, "drop"),  # type: ignore[arg-type]
        ValueError,
        "remainder is 'drop'; expected one of error, pad, uneven",
    ),
    (lambda: TWO.pad(0), ValueError, "multiple is 0; expected 1 or more"),
    (
        lambda: TWO.chunk(5),
        UnevenBatchError,
        "a batch of 2 rows does not divide over 5 parts; nearest valid sizes: 5.",
    ),
    (
        lambda: one(torch.zeros(1, 1)).group_by("a"),
        TypeError,
        "column 'a' has more than one value for a row",
    ),
    (
        lambda: one(Ragged(np.zeros(1), [0, 1])).group_by("a"),
        TypeError,
        "give group_by a function of the row",
    ),
    (
        lambda: one([[1]]).group_by("a"),
        TypeError,
        "group_by needs hashable values: unhashable type: 'list'",
    ),
    (lambda: TWO.group_by(lambda row: [row]), TypeError, "give group_by a function of the row"),  # type: ignore[arg-type, return-value]
    (
        lambda: PADDED.take([0]),
        ValueError,
        "take requires a batch without padding, and the last 1 rows are padding; call unpad",
    ),
    (lambda: PADDED.reorder([0, 2, 1]), ValueError, "reorder requires a batch without padding"),
    (lambda: PADDED.group_by("a"), ValueError, "group_by requires a batch without padding"),
    (
        lambda: TWO.union(TWO[:1]),
        ValueError,
        "union needs equal numbers of rows; got 2 rows (0 padding) and 1 rows (0 padding)",
    ),
    (
        lambda: PADDED.union(one([1, 2, 3])),
        ValueError,
        "got 3 rows (1 padding) and 3 rows (0 padding)",
    ),
    (
        lambda: TWO.union(one([1, 3])),
        ValueError,
        "both batches have the column 'a', with different values; drop or rename one",
    ),
    (lambda: Batch.concat([]), ValueError, "concat needs at least one batch"),
    (
        lambda: Batch.concat([TWO, None]),  # type: ignore[list-item]
        TypeError,
        "concat joins batches, and entry 1 is a NoneType",
    ),
    (
        lambda: Batch.concat([TWO, Batch({"b": [1]})]),
        ValueError,
        "batch 1 has the columns b; the first has a",
    ),
    (
        lambda: Batch.concat([PADDED, TWO]),
        ValueError,
        "batch 1 cannot be joined to a batch that ends with padding; unpad() that batch first",
    ),
    (
        lambda: Batch.concat([TWO, one(np.zeros(1))]),
        TypeError,
        "column 'a': parts differ in kinds: list, array",
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED]
)
def test_batch_invalid_arguments(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_batch_rename() -> None:
    batch = Batch({"a": [1], "b": [2]}, {"step": 3})
    assert dict(batch.rename({"a": "alpha"}).columns) == {"alpha": [1], "b": [2]}
    assert dict(batch.rename({"a": "b", "b": "a"}).columns) == {"b": [1], "a": [2]}
    assert batch.rename({}).meta == {"step": 3}
    with pytest.raises(KeyError, match="c"):
        batch.rename({"c": "d"})
    with pytest.raises(ValueError, match="two columns would have the name b"):
        batch.rename({"a": "b"})


def test_batch_without_meta() -> None:
    batch = Batch({"a": [1]}, {"step": 3, "seed": 4})
    assert batch.without_meta("step").meta == {"seed": 4}
    assert batch.without_meta("none").meta == {"step": 3, "seed": 4}
    assert batch.without_meta().meta == {}
    assert batch.meta == {"step": 3, "seed": 4} and batch.without_meta()["a"] == [1]


def test_concat_merges_metrics() -> None:
    metas: list[dict[str, Any]] = [
        {"metrics": {"acc": 0.8, "loss": np.array([0.1, 0.2])}, "lr": 1},
        {"metrics": {"loss": [0.15], "names": "x"}, "lr": 1},
        {"lr": 1},
        {"metrics": {"acc": torch.tensor(0.5), "loss": torch.tensor([0.5])}, "lr": 2},
    ]
    joined = Batch.concat([Batch({"x": [1]}, meta) for meta in metas])
    assert joined.meta["metrics"] == {
        "acc": [0.8, 0.5],
        "loss": [0.1, 0.2, 0.15, 0.5],
        "names": ["x"],
    }
    assert joined.meta["lr"] == PerPart([1, 1, 1, 2])
    one = Batch({"x": [1]}, metas[0])
    assert Batch.concat([one]) is one
    none = Batch.concat([Batch({"x": [1]}, {"metrics": None})] * 2)
    assert none.meta["metrics"] is None
    odd = Batch.concat([Batch({"x": [1]}, {"metrics": 1}), Batch({"x": [1]}, {"metrics": 2})])
    assert odd.meta["metrics"] == PerPart([1, 2]), "only dicts are merged"


def test_concat_fills_rows() -> None:
    parts = [
        Batch(
            {"t": torch.ones(1, 2, dtype=torch.int64), "a": np.ones((1, 1, 2), dtype=np.float32)}
        ),
        Batch({"t": torch.full((2, 3), 2), "a": np.full((2, 2, 1), 2, dtype=np.float32)}),
    ]
    joined = Batch.concat(parts, fill={"t": -1, "a": 0})
    assert joined["t"].tolist() == [[1, 1, -1], [2, 2, 2], [2, 2, 2]]
    assert joined["a"].dtype == np.float32
    assert joined["a"].tolist() == [[[1, 1], [0, 0]], [[2, 0], [2, 0]], [[2, 0], [2, 0]]]
    with pytest.raises(ValueError, match="column 't': parts differ in row shapes"):
        Batch.concat(parts, fill={"a": 0})
    with pytest.raises(TypeError, match="only rows of tensors and arrays can be padded; got lis"):
        Batch.concat([Batch({"x": [1]})] * 2, fill={"x": 0})
    with pytest.raises(ValueError, match="with different numbers of dimensions cannot be padded"):
        Batch.concat([Batch({"x": np.ones(1)}), Batch({"x": np.ones((1, 1))})], fill={"x": 0})
