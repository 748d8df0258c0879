"""Batches: what is cut comes together again, slices are views, nothing changes under a batch, and errors say what to do."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helmsman.api.batch import Batch, PerPart, join_meta, part_sizes
from helmsman.api.columns import Ragged, same
from helmsman.api.errors import UnevenBatchError
from helmsman.rpc_server._wire.codec import decode, encode
from tests.api.columns import QUICK, ROWS, columns, pickles_as_it_is

METAS = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(0, 3),
        "loss": st.just(float("nan")),
        "scale": st.builds(lambda value: torch.tensor([value, torch.nan]), st.floats(0, 1)),
        "names": st.just(["a", "b"]),
    },
)
REMAINDERS = st.sampled_from(["error", "pad", "uneven"])


@st.composite
def batches(draw: st.DrawFn, num_rows: st.SearchStrategy[int] = ROWS) -> Batch:
    """Batches with columns of every kind, or none."""
    count = draw(num_rows)
    drawn = draw(st.dictionaries(st.sampled_from("abcd"), columns(count), max_size=4))
    return Batch(drawn, draw(METAS), num_rows=count)


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    return list(batch)


def view_of(column: Any) -> int | None:
    """Where the memory of a column begins, None for a list, and for what has no elements."""
    values = column.values if isinstance(column, Ragged) else column
    if isinstance(values, list) or 0 in values.shape:
        return None
    if isinstance(values, torch.Tensor):
        return values.untyped_storage().data_ptr()
    while values.base is not None:
        values = values.base
    return id(values)


def is_view(part: Batch, whole: Batch) -> bool:
    return all(view_of(column) in (None, view_of(whole[name])) for name, column in part.columns.items())


# --- the algebra -------------------------------------------------------------------------------------------------------


@QUICK
@given(batches(), st.integers(1, 9), REMAINDERS)
def test_chunks_joined_again_are_the_batch(batch: Batch, num_chunks: int, remainder: Any) -> None:
    if remainder == "error" and len(batch) % num_chunks:
        with pytest.raises(UnevenBatchError):
            batch.chunk(num_chunks, remainder)
        return
    chunks = batch.chunk(num_chunks, remainder)
    joined = Batch.concat(chunks)
    assert len(chunks) == num_chunks
    assert joined.unpad().equals(batch)
    sizes = [len(chunk) for chunk in chunks]
    if remainder == "uneven":
        assert joined.equals(batch)
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
    else:
        assert joined.equals(batch.pad(num_chunks))
        assert len(set(sizes)) == 1
    assert all(is_view(chunk, batch) for chunk in chunks if not chunk.num_padding)
    assert all(chunk.meta == batch.meta or same(dict(chunk.meta), dict(batch.meta)) for chunk in chunks)


@QUICK
@given(batches(), st.integers(1, 9), st.integers(1, 9))
def test_padding_repeats_the_last_row_is_masked_and_comes_off_again(batch: Batch, first: int, second: int) -> None:
    padded = batch.pad(first)
    assert padded is batch or len(batch) % first
    for each in (padded, padded.pad(second), *padded.chunk(second, "pad")):
        real = len(each) - each.num_padding
        assert list(map(bool, each.mask)) == [True] * real + [False] * each.num_padding
        assert len(each.mask) == len(each)
        assert all(same(each[row], batch[-1]) for row in range(real, len(each)))
        assert len(each.unpad()) == real
    assert len(padded.pad(second)) % second == 0
    assert padded.pad(second).unpad().equals(batch)
    assert sum(chunk.num_padding for chunk in padded.chunk(second, "pad")) == padded.pad(second).num_padding


@QUICK
@given(batches(), st.slices(30), st.integers(1, 5))
def test_slices_are_those_of_the_rows_and_views(batch: Batch, part: slice, multiple: int) -> None:
    cut = batch[part]
    assert same(rows_of(cut), rows_of(batch)[part])
    assert len(cut) == len(range(len(batch))[part])
    assert part.step not in (None, 1) or is_view(cut, batch)
    padded = batch.pad(multiple)
    if part.step in (None, 1):
        mask = [True] * len(batch) + [False] * padded.num_padding
        assert list(map(bool, padded[part].mask)) == mask[part]


@QUICK
@given(batches(), st.data())
def test_parts_of_a_split_are_views_and_all_rows(batch: Batch, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=5)))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
    parts = batch.split(np.array(sizes))  # type: ignore[arg-type]
    assert [len(part) for part in parts] == sizes
    assert all(is_view(part, batch) for part in parts)
    assert Batch.concat(parts).equals(batch)


@QUICK
@given(batches(), st.data())
def test_taken_rows_are_those_of_the_batch(batch: Batch, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(-len(batch), len(batch) - 1), max_size=40)) if len(batch) else []
    expected = [rows_of(batch)[row] for row in rows]
    for given_rows in (rows, tuple(rows), np.array(rows, "i4"), torch.tensor(rows, dtype=torch.int16)):
        assert same(rows_of(batch.take(given_rows)), expected)
        assert batch[given_rows].equals(batch.take(rows))
    assert same(dict(batch.take(rows).meta), dict(batch.meta))
    flags = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    for mask in (flags, np.array(flags, bool), torch.tensor(flags, dtype=torch.bool)):
        assert same(rows_of(batch[mask]), [row for row, flag in zip(batch, flags, strict=True) if flag])


@QUICK
@given(batches().flatmap(lambda batch: st.tuples(st.just(batch), st.permutations(range(len(batch))))))
def test_a_permutation_is_undone_by_its_inverse(given_pair: tuple[Batch, list[int]]) -> None:
    batch, permutation = given_pair
    reordered = batch.reorder(permutation)
    assert all(same(reordered[at], batch[row]) for at, row in enumerate(permutation))
    inverse = np.argsort(np.array(permutation, dtype=int))
    assert reordered.reorder(inverse).equals(batch)


@QUICK
@given(batches(), st.integers(0, 4))
def test_repeated_rows_lie_together_or_batch_after_batch(batch: Batch, times: int) -> None:
    rows = rows_of(batch)
    assert same(rows_of(batch.repeat(times)), [row for row in rows for _ in range(times)])
    assert same(rows_of(batch.repeat(times, interleave=False)), rows * times)
    assert len(batch.repeat(times)) == len(batch) * times


@QUICK
@given(batches(), st.data())
def test_groups_have_the_rows_of_their_key_in_order(batch: Batch, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch)))
    for column in (keys, torch.tensor(keys, dtype=torch.uint8), np.array(keys, "f2"), np.array(keys, "U1").astype(object)):
        keyed = batch.with_columns(key=column)
        groups = keyed.group_by("key")
        assert list(map(int, groups)) == list(dict.fromkeys(keys))
        for key, group in groups.items():
            rows = [row for row, its in enumerate(keys) if its == int(key)]
            assert group.equals(keyed.take(rows))
        by_function = keyed.group_by(lambda row: int(row["key"]))
        assert all(same(rows_of(group), rows_of(groups[key])) for key, group in zip(groups, by_function.values(), strict=True))
        assert all(is_view(group, keyed) for group in groups.values()) or keys != sorted(keys)


@QUICK
@given(batches(), st.data())
def test_selected_and_other_columns_make_up_the_batch(batch: Batch, data: st.DataObject) -> None:
    names = data.draw(st.permutations(list(batch.columns)))
    names = names[: data.draw(st.integers(0, len(names)))]
    selected, rest = batch.select(*names), batch.without(*names)
    assert list(selected.columns) == names
    assert len(selected) == len(rest) == len(batch)
    assert selected.union(rest).equals(batch)
    assert rest.union(selected).union(batch).equals(batch)
    assert all(selected[name] is batch[name] for name in names if not isinstance(batch[name], list))


@QUICK
@given(batches(), st.integers(1, 5))
def test_a_batch_survives_every_pickle(batch: Batch, multiple: int) -> None:
    native = batch.select(*(name for name, column in batch.columns.items() if pickles_as_it_is(column))).pad(multiple)
    for each in (native, native[len(native) // 2 :]):
        for restored in (
            pickle.loads(pickle.dumps(each, 5)),
            pickle.loads(pickle.dumps(each, 2)),
            decode(encode(each)),
            decode(encode(each, inband_below=0)),
            copy.copy(each),
        ):
            assert type(restored) is Batch
            assert restored.equals(each)
            assert restored.num_padding == each.num_padding


# --- bytes -------------------------------------------------------------------------------------------------------------


def wide_batch() -> Batch:
    """8 KB a row."""
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
    "num_bytes",
    [
        lambda part: len(pickle.dumps(part, 5)),
        lambda part: encode(part).nbytes,
        lambda part: encode({"deep": [part]}).nbytes,
        lambda part: len(pickle.dumps({"deep": [part]})),
    ],
)
def test_a_slice_is_sent_as_its_own_bytes(num_bytes: Callable[[Batch], int]) -> None:
    batch = wide_batch()
    assert num_bytes(batch[10:15]) < 5 * 8192 + 4000
    assert num_bytes(batch) > 100 * 8192


def test_the_codec_takes_slices_where_they_lie() -> None:
    batch = wide_batch()
    part = batch[10:15]
    payload = encode(part)
    assert len(payload.buffers) == 5, "one for each column; offsets go in the stream"
    addresses = {np.frombuffer(buffer, np.uint8).__array_interface__["data"][0] for buffer in payload.buffers}
    expected = {
        part["tensor"].data_ptr(),
        part["bf16"].data_ptr(),
        part["array"].__array_interface__["data"][0],
        part["ragged"].values.data_ptr(),
        part["ragged_array"].values.__array_interface__["data"][0],
    }
    assert addresses == expected


# --- frozen ------------------------------------------------------------------------------------------------------------


def test_nothing_of_a_batch_can_be_set() -> None:
    batch = Batch({"a": [1]}, {"m": 1})
    with pytest.raises(AttributeError, match="a Batch is frozen; 'columns' cannot be set. with_columns and with_meta return"):
        batch.columns = {}  # type: ignore[misc]
    with pytest.raises(AttributeError, match="a Batch is frozen; 'extra' cannot be set"):
        batch.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="a Batch is frozen; '_meta' cannot be deleted"):
        del batch._meta
    with pytest.raises(TypeError):
        batch.columns["b"] = [1]  # type: ignore[index]
    with pytest.raises(TypeError):
        batch.meta["n"] = 1  # type: ignore[index]
    with pytest.raises(TypeError):
        batch["a"] = [2]  # type: ignore[index]


def test_what_its_maker_does_later_to_lists_and_dicts_does_not_change_it() -> None:
    prompts, columns, meta = ["a", "b"], {}, {"step": 1}
    columns["prompt"] = prompts
    batch = Batch(columns, meta)
    prompts.clear()
    columns["other"] = []
    meta["step"] = 2
    assert batch["prompt"] == ["a", "b"]
    assert (list(batch.columns), dict(batch.meta)) == (["prompt"], {"step": 1})


def test_changed_batches_leave_the_old_one_alone() -> None:
    batch = Batch({"a": [1, 2]}, {"m": 1}).pad(3)
    changed = batch.with_columns(a=(3, 4, 5), b=torch.zeros(3)).with_meta(m=2, n=float("nan"))
    assert (list(changed.columns), changed["a"], dict(changed.meta)["m"]) == (["a", "b"], [3, 4, 5], 2)
    assert (list(batch.columns), batch["a"], dict(batch.meta)) == (["a"], [1, 2, 2], {"m": 1})
    assert changed.num_padding == 1


# --- meta --------------------------------------------------------------------------------------------------------------


def test_meta_that_differs_is_kept_per_part() -> None:
    metas: list[dict[str, Any]] = [
        {"same": torch.tensor([1.0, torch.nan]), "nan": math.nan, "step": 1, "first": 1, "none": None},
        {"same": torch.tensor([1.0, torch.nan]), "nan": float("nan"), "step": 2, "second": 2},
    ]
    joined = Batch.concat([Batch({"a": [1]}, meta) for meta in metas]).meta
    assert list(joined) == ["same", "nan", "step", "first", "none", "second"]
    assert joined["same"] is metas[0]["same"]
    assert math.isnan(joined["nan"])
    assert [joined[name] for name in ("step", "first", "none", "second")] == [
        PerPart((1, 2)),
        PerPart((1, None)),
        PerPart((None, None)),
        PerPart((None, 2)),
    ]
    assert type(joined["step"]) is PerPart


def test_meta_per_part_survives_pickling_and_joining() -> None:
    batch = Batch.concat([Batch({"a": [part]}, {"step": part}) for part in range(2)])
    assert type(decode(encode(batch)).meta["step"]) is PerPart
    assert Batch.concat(batch.chunk(2)).meta["step"] == PerPart((0, 1))
    assert Batch.concat([batch, batch.with_meta(step=2)]).meta["step"] == PerPart((PerPart((0, 1)), 2))


def test_a_value_is_no_per_part_of_the_same_values() -> None:
    assert join_meta([{"a": (1, 2)}, {"a": PerPart((1, 2))}])["a"] == PerPart(((1, 2), PerPart((1, 2))))


# --- what is in it -----------------------------------------------------------------------------------------------------


def test_rows_are_dicts() -> None:
    batch = Batch({"x": torch.tensor([[1, 2], [3, 4]]), "r": Ragged(np.arange(3), [0, 1, 3]), "t": ["a", "b"]})
    for row in (batch[1], batch[-1], batch[np.int64(1)], batch[torch.tensor(1)], batch[np.array(1)], list(batch)[1]):
        assert {name: getattr(value, "tolist", lambda value=value: value)() for name, value in row.items()} == {
            "x": [3, 4],
            "r": [1, 2],
            "t": "b",
        }
    assert "x" in batch
    assert "y" not in batch
    assert 0 not in batch


def test_an_empty_batch_is_no_missing_one() -> None:
    batch = Batch({})
    assert len(batch) == 0
    assert batch
    assert [len(chunk) for chunk in batch.chunk(3)] == [0, 0, 0]
    assert batch.pad(4) is batch
    assert batch.repeat(2).equals(batch)
    assert batch.group_by(lambda row: 1) == {}
    assert rows_of(Batch({}, num_rows=2)) == [{}, {}]


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
def test_the_mask_is_of_the_kind_of_the_batch(columns: Any, mask: Any) -> None:
    found = Batch(columns).pad(2).mask
    assert type(found) is type(mask)
    assert getattr(found, "device", None) == getattr(mask, "device", None)
    assert getattr(mask, "is_meta", False) or same(found, mask)


def test_columns_stay_on_their_device() -> None:
    """meta stands for any device other than the host; offsets and indices are on the host."""
    values = torch.zeros(5, 2, device="meta")
    batch = Batch({"t": values[:3], "r": Ragged(values, [0, 2, 2, 5])})
    for made in (
        batch[1:],
        batch.take(torch.tensor([2, 0])),
        batch.repeat(2),
        Batch.concat(batch.chunk(2, "pad")).unpad(),
        *batch.group_by(lambda row: len(row["r"])).values(),
    ):
        assert (made["t"].device.type, made["t"].shape[1:]) == ("meta", (2,))
        assert (made["r"].values.device.type, made["r"].offsets.device.type) == ("meta", "cpu")
        assert len(made["r"].values) == sum(made["r"].lengths)


def test_a_mask_takes_the_rows_that_are_no_padding() -> None:
    padded = Batch({"a": [1, 2, 3]}).pad(4)
    assert Batch({"a": padded["a"]})[padded.mask]["a"] == [1, 2, 3]


def test_texts_show_what_is_in_a_batch() -> None:
    batch = Batch({"x": torch.zeros(2, 3), "a": np.zeros(2), "t": ["a", "b"], "r": Ragged(np.arange(3), [0, 1, 3])}, {"k": 1})
    assert repr(batch.pad(3)) == (
        "Batch(3 rows (1 of them padding), x: (3, 3) torch.float32, a: (3,) float64, t: list, "
        "r: Ragged(3 rows, values (5,) int64), meta: k)"
    )
    assert repr(Batch({}, num_rows=2)) == "Batch(2 rows, no columns)"


def test_batches_inside_batches_are_compared_as_batches() -> None:
    def nested(value: float) -> Batch:
        return Batch({"turns": [Batch({"a": torch.tensor([value])})]}, {"prompt": Batch({"a": np.array([value])})})

    assert nested(math.nan).equals(nested(math.nan))
    assert not nested(1).equals(nested(2))
    assert decode(encode(nested(1))).equals(nested(1))


def test_batches_that_differ_in_anything_are_not_equal() -> None:
    batch = Batch({"a": [1, 1]}, {"m": 1})
    assert batch.equals(Batch.from_dict({"a": (1, 1)}, MappingProxyType({"m": 1})))
    for other in (
        batch.with_columns(a=[1, 2]),
        batch.with_columns(b=[1, 2]),
        batch.with_meta(m=2),
        batch[:1],
        batch[:1].pad(2),
        batch.with_columns(a=torch.ones(2)),
        batch.to_dict(),
    ):
        assert not batch.equals(other)


def test_dicts_have_neither_meta_nor_padding() -> None:
    assert Batch({"a": [1, 2, 3]}, {"m": 1}).pad(2).to_dict() == {"a": [1, 2, 3]}


def test_nan_are_one_group() -> None:
    groups = Batch({"a": torch.tensor([math.nan, 1.0, math.nan])}).group_by("a")
    assert [len(group) for group in groups.values()] == [2, 1]


def test_numpy_integers_may_be_counts() -> None:
    batch = Batch({}, num_rows=np.int64(4))  # type: ignore[arg-type]
    assert type(len(batch)) is int
    assert [len(chunk) for chunk in batch.chunk(np.int64(3), "pad")] == [2, 2, 2]  # type: ignore[arg-type]
    assert len(batch.repeat(np.int64(2)).pad(np.int64(3))) == 9  # type: ignore[arg-type]


# --- errors ------------------------------------------------------------------------------------------------------------

TWO = Batch({"a": [1, 2]})
PADDED = TWO.pad(3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Batch({"a": 1}), TypeError, "column 'a' is a int; a column is a tensor or array with at least one dimension"),
        (lambda: Batch({"a": "text"}), TypeError, "column 'a' is a str;"),
        (lambda: Batch({"a": None}), TypeError, "Put what belongs to all rows in meta"),
        (lambda: Batch({"a": torch.tensor(1)}), TypeError, "column 'a' is a tensor or array without dimensions"),
        (lambda: Batch({"a": np.array(1)}), TypeError, "column 'a' is a tensor or array without dimensions"),
        (lambda: Batch({"a": torch.eye(2).to_sparse()}), TypeError, "column 'a' is a sparse tensor; make a dense one"),
        (
            lambda: Batch({"a": torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)}),
            TypeError,
            "column 'a' is a nested tensor; make a Ragged of its values() and offsets()",
        ),
        (lambda: Batch({"a": np.ma.array([1])}), TypeError, "column 'a' is a masked array; give its data and its mask as two"),
        (lambda: Batch({1: [1]}), TypeError, "names of columns are strings, not 1"),
        (lambda: Batch({"a": [1], "b": [1, 2]}), ValueError, "columns of one batch have as many rows; got a: 1, b: 2"),
        (lambda: Batch({"a": [1]}, num_rows=2), ValueError, "got a: 1, num_rows: 2"),
        (lambda: Batch({}, num_rows=-1), ValueError, "num_rows is -1; it is 0 or more"),
        (lambda: Batch({}, num_rows=1.0), TypeError, "float"),
        (lambda: Batch({"a": [1]}, num_padding=2), ValueError, "num_padding is 2 of 1 rows"),
        (lambda: Batch({"a": [1]}, num_padding=-1), ValueError, "num_padding is -1 of 1 rows"),
        (lambda: TWO.with_columns(b=[1]), ValueError, "got a: 2, b: 1, num_rows: 2"),
        (lambda: TWO["b"], KeyError, "no column 'b'; there are a"),
        (lambda: TWO.select("b"), KeyError, "no column 'b'; there are a"),
        (lambda: Batch({}).without("b"), KeyError, "no column 'b'; there are none"),
        (lambda: TWO[2], IndexError, "row 2 of 2"),
        (lambda: TWO[-3], IndexError, "row -3 of 2"),
        (lambda: Batch({})[0], IndexError, "row 0 of 0"),
        (lambda: TWO[10**30], IndexError, f"row {10**30} of 2"),
        (lambda: TWO[True], TypeError, "a single True does not tell rows; a mask has a value for each row"),
        (lambda: TWO[np.True_], TypeError, "a single np.True_ does not tell rows"),
        (lambda: TWO[torch.tensor(True)], TypeError, "a single tensor(True) does not tell rows"),
        (lambda: TWO[np.float64(1)], TypeError, "float64"),
        (lambda: TWO[1.5], TypeError, "rows are told by integers or a mask, not by float 1.5"),
        (lambda: TWO[None], TypeError, "rows are told by integers or a mask"),
        (lambda: TWO["a", "b"], TypeError, "an integer is needed, not 'a'"),
        (lambda: TWO[[0, 2]], IndexError, "row 2 of 2"),
        (lambda: TWO.take([-3]), IndexError, "row -3 of 2"),
        (lambda: TWO.take([0.5]), TypeError, "an integer is needed, not 0.5"),
        (lambda: TWO.take([True]), IndexError, "a mask of 1 rows for 2 rows"),
        (lambda: TWO[::0.5], TypeError, "slice indices must be integers"),
        (lambda: TWO.reorder([0]), ValueError, "a permutation of 2 rows has each of them once; got 1 indices: 0"),
        (lambda: TWO.reorder([0, 0]), ValueError, "a permutation of 2 rows has each of them once; got 2 indices: 0, 0"),
        (lambda: TWO.reorder([0, 2]), ValueError, "a permutation of 2 rows has each of them once: row 2 of 2"),
        (lambda: TWO.repeat(-1), ValueError, "times is -1; it is 0 or more"),
        (lambda: TWO.repeat(1.5), TypeError, "float"),
        (lambda: TWO.split([1, 2]), ValueError, "sizes [1, 2] add up to 3, and there are 2 rows"),
        (lambda: TWO.split([]), ValueError, "sizes [] add up to 0"),
        (lambda: TWO.split([3, -1]), ValueError, "a part has -1 rows; it has 0 or more"),
        (lambda: TWO.split([1.5, 0.5]), TypeError, "float"),
        (lambda: TWO.chunk(0), ValueError, "num_parts is 0; it is 1 or more"),
        (lambda: TWO.chunk(0, "pad"), ValueError, "num_chunks is 0; it is 1 or more"),
        (lambda: TWO.chunk(-1, "uneven"), ValueError, "num_parts is -1; it is 1 or more"),
        (lambda: TWO.chunk(2, "drop"), ValueError, "remainder is 'drop'; it is one of error, pad, uneven"),
        (lambda: TWO.chunk(1.5, "pad"), TypeError, "float"),
        (lambda: TWO.pad(0), ValueError, "multiple is 0; it is 1 or more"),
        (lambda: TWO.chunk(5), UnevenBatchError, "a batch of 2 rows does not divide over 5 parts; nearest valid sizes: 5."),
        (
            lambda: part_sizes(7, 2, "pad"),
            UnevenBatchError,
            "7 rows does not divide over 2 parts; nearest valid sizes: 6 and 8.",
        ),
        (lambda: TWO.group_by("b"), KeyError, "no column 'b'"),
        (lambda: Batch({"a": torch.zeros(1, 1)}).group_by("a"), TypeError, "column 'a' has more than one value for a row"),
        (lambda: Batch({"a": Ragged(np.zeros(1), [0, 1])}).group_by("a"), TypeError, "give group_by a function of the row"),
        (lambda: Batch({"a": [[1]]}).group_by("a"), TypeError, "rows are grouped by hashable values: unhashable type: 'list'"),
        (lambda: TWO.group_by(lambda row: [row]), TypeError, "give group_by a function of the row"),
        (lambda: PADDED.take([0]), ValueError, "take of a batch whose last 1 rows are padding; unpad() first"),
        (lambda: PADDED[[0]], ValueError, "indexing of a batch whose last 1 rows are padding"),
        (lambda: PADDED[::-1], ValueError, "take of a batch whose last 1 rows are padding"),
        (lambda: PADDED.reorder([0, 2, 1]), ValueError, "reorder of a batch whose last 1 rows"),
        (lambda: PADDED.repeat(2), ValueError, "repeat of a batch whose last 1 rows"),
        (lambda: PADDED.group_by("a"), ValueError, "group_by of a batch whose last 1 rows"),
        (lambda: TWO.union(TWO[:1]), ValueError, "a union is made row by row; got 2 rows (0 padding) and 1 rows (0 padding)"),
        (lambda: PADDED.union(Batch({"b": [1, 2, 3]})), ValueError, "got 3 rows (1 padding) and 3 rows (0 padding)"),
        (
            lambda: TWO.union(Batch({"a": [1, 3]})),
            ValueError,
            "both batches have the column 'a', with different values; drop or rename one",
        ),
        (lambda: TWO.with_meta(m=1).union(TWO.with_meta(m=2)), ValueError, "both batches have the meta entry 'm'"),
        (lambda: Batch.concat([]), ValueError, "concat needs at least one batch"),
        (lambda: Batch.concat(iter(())), ValueError, "concat needs at least one batch"),
        (lambda: Batch.concat([TWO, None]), TypeError, "concat joins batches, and entry 1 is a NoneType"),
        (lambda: Batch.concat(TWO), TypeError, "concat joins batches, and entry 0 is a dict"),
        (lambda: Batch.concat([TWO, Batch({"b": [1]})]), ValueError, "batch 1 has the columns b; the first has a"),
        (lambda: Batch.concat([TWO, Batch({})]), ValueError, "batch 1 has the columns none; the first has a"),
        (lambda: Batch.concat([PADDED, TWO]), ValueError, "batch 1 has rows behind the padding of one before it; unpad first"),
        (
            lambda: Batch.concat([TWO, Batch({"a": np.zeros(1)})]),
            TypeError,
            "column 'a': parts of different kinds: list, array",
        ),
        (
            lambda: Batch.concat([Batch({"a": torch.zeros(1)}), Batch({"a": torch.zeros(1).int()})]),
            TypeError,
            "column 'a': parts of different dtypes: torch.float32, torch.int32",
        ),
        (
            lambda: Batch.concat([Batch({"a": torch.zeros(1, 2)}), Batch({"a": torch.zeros(1, 3)})]),
            ValueError,
            "column 'a': parts of different shapes of a row: (2,), (3,)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()
