"""Columns: cut, taken and joined as their rows would be one by one; ragged ones in one piece of memory."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from helmsman.api.columns import Column, Ragged, concat_columns, kind_of, own, same, slice_of, take
from helmsman.api.row_numbers import RowNumbers
from tests.api.columns import QUICK, ROWS, columns, pickles_as_it_is, plain_rows, raggeds

SIZED = ROWS.flatmap(lambda num_rows: st.tuples(st.just(num_rows), columns(num_rows)))
RAGGED = ROWS.flatmap(raggeds)


def memory(values: Any) -> tuple[int, int]:
    """First address and one past the last of what a tensor or array lies in."""
    if isinstance(values, torch.Tensor):
        storage = values.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    bounds: tuple[int, int] = np.lib.array_utils.byte_bounds(values)
    return bounds


def shares_memory(part: Column, whole: Column) -> bool:
    """Whether the part lies in the memory of the whole; what has no elements lies nowhere."""
    if isinstance(part, Ragged):
        return isinstance(whole, Ragged) and shares_memory(part.values, whole.values)
    if isinstance(part, list):
        return all(any(item is other for other in whole) for item in part)
    if isinstance(part, torch.Tensor):
        return not part.numel() or memory(part) == memory(whole)
    return not part.size or np.shares_memory(part, whole)  # type: ignore[arg-type]


def any_element(column: Any) -> bool:
    dense = column.values if isinstance(column, Ragged) else column
    return 0 not in dense.shape


# --- every kind --------------------------------------------------------------------------------------------------------


@QUICK
@given(SIZED, st.data())
def test_a_slice_has_its_rows_and_is_a_view(sized: tuple[int, Column], data: st.DataObject) -> None:
    num_rows, column = sized
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    part = slice_of(column, start, stop)
    assert kind_of(part) == kind_of(column)
    assert len(part) == stop - start
    assert same(plain_rows(part), plain_rows(column)[start:stop])
    assert shares_memory(part, column)


@QUICK
@given(SIZED, st.data())
def test_taken_rows_are_those_of_the_column_and_copies(sized: tuple[int, Column], data: st.DataObject) -> None:
    num_rows, column = sized
    rows = data.draw(st.lists(st.integers(-num_rows, num_rows - 1), max_size=40)) if num_rows else []
    taken = take(column, rows)
    assert kind_of(taken) == kind_of(column)
    assert same(plain_rows(taken), [plain_rows(column)[row] for row in rows])
    assert isinstance(column, list) or not any_element(taken) or not shares_memory(taken, column)


@QUICK
@given(SIZED, st.data())
def test_slices_joined_again_are_the_column(sized: tuple[int, Column], data: st.DataObject) -> None:
    num_rows, column = sized
    cuts = sorted(data.draw(st.lists(st.integers(0, num_rows), max_size=4)))
    parts = [slice_of(column, start, stop) for start, stop in zip([0, *cuts], [*cuts, num_rows], strict=True)]
    assert same(concat_columns(parts), column)


@QUICK
@given(SIZED)
def test_a_column_is_the_same_as_its_copy_and_not_as_another(sized: tuple[int, Column]) -> None:
    num_rows, column = sized
    copied = take(column, range(num_rows))
    assert same(column, copied)
    assert same(copied, column)
    if num_rows:
        assert not same(column, slice_of(column, 0, num_rows - 1))


@QUICK
@given(SIZED)
def test_own_memory_is_kept_and_of_a_view_only_its_own_is_copied(sized: tuple[int, Column]) -> None:
    num_rows, column = sized
    for part in (column, slice_of(column, 0, num_rows // 2)):
        kept = own(part)
        assert same(kept, part)
        if isinstance(part, torch.Tensor):
            assert kept.untyped_storage().nbytes() <= part.numel() * part.element_size()
        else:
            assert kept is part


def test_kinds() -> None:
    assert kind_of(torch.zeros(2)) == kind_of(torch.nn.Parameter(torch.zeros(2))) == "tensor"
    assert kind_of(np.zeros(2)) == "array"
    assert kind_of([]) == "list"
    assert kind_of(Ragged(torch.zeros(0), [0])) == "ragged"
    for other in (torch.tensor(1), np.array(1), np.float64(1), 1, "text", (1, 2), {"a": 1}, None, range(3)):
        assert kind_of(other) == ""
    assert kind_of(torch.eye(2).to_sparse()) == ""
    assert kind_of(torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)) == ""


def test_lists_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from helmsman.api.batch import Batch\n"
        "batch = Batch({'a': [1, 2, 3], 'b': ['x', 'y', 'x']})\n"
        "batch = Batch.concat(batch.pad(2).chunk(2)).unpad().reorder([2, 0, 1]).repeat(2)\n"
        "assert list(batch.group_by('b')) == ['x', 'y'] and batch[batch.mask].equals(batch)\n"
        "assert not {'torch', 'numpy', 'tensordict'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64])
def test_dtypes_with_few_kernels_go_all_ways(dtype: torch.dtype) -> None:
    column = torch.arange(6).to(torch.float32).to(dtype)
    assert same(concat_columns([column[:2], column[2:]]), column)
    assert same(take(column, [5, 0]).to(torch.float32), torch.tensor([5.0, 0.0]))
    full, mask = Ragged(column, [0, 2, 6]).padded()
    assert same(full[mask], column)


def test_gradients_flow_through_cutting_taking_and_joining() -> None:
    weights = torch.ones(4, 2, requires_grad=True)
    ragged = Ragged(weights, [0, 1, 4])
    joined = concat_columns([slice_of(weights, 0, 2), take(weights, [3, 3]), take(ragged, [1]).values, ragged.padded()[0][0]])
    joined.sum().backward()
    assert weights.grad is not None
    assert weights.grad[:, 0].tolist() == [2, 2, 1, 3]


# --- joining -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([torch.zeros(1), [1]], TypeError, "parts of different kinds: tensor, list"),
        ([torch.zeros(1), 3], TypeError, "parts of different kinds: tensor, int"),
        ([torch.zeros(1), torch.zeros(1, dtype=torch.int64)], TypeError, "dtypes: torch.float32, torch.int64"),
        ([np.zeros(1), np.zeros(1, "f4")], TypeError, "dtypes: float32, float64"),
        ([np.zeros(1, "U1"), np.zeros(1, "S1")], TypeError, "dtypes: <U1, |S1"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], ValueError, "shapes of a row: (2,), (3,)"),
        ([torch.zeros(0), torch.zeros(1, 3)], ValueError, "shapes of a row: (), (3,)"),
        ([np.zeros((1, 2)), np.zeros((1, 3))], ValueError, "shapes of a row: (2,), (3,)"),
        ([torch.zeros(1), torch.zeros(1, device="meta")], ValueError, "devices: cpu, meta"),
        ([Ragged(torch.zeros(1), [0, 1]), Ragged(np.zeros(1), [0, 1])], TypeError, "kinds: tensor, array"),
        ([Ragged(torch.zeros(1), [0, 1]), Ragged(torch.zeros(1, 2), [0, 1])], ValueError, "shapes of a row: (), (2,)"),
    ],
)
def test_what_does_not_go_together_is_refused(parts: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        concat_columns(parts)


def test_texts_of_different_lengths_are_joined() -> None:
    assert concat_columns([np.array(["a"]), np.array(["long"])]).tolist() == ["a", "long"]  # type: ignore[union-attr]
    assert concat_columns([np.array([b"a"]), np.array([b"long"])]).tolist() == [b"a", b"long"]  # type: ignore[union-attr]


def test_one_part_is_itself() -> None:
    column = torch.zeros(3)
    assert concat_columns([column]) is column


# --- equality ----------------------------------------------------------------------------------------------------------


@dataclass
class Holder:
    """Its == is that of a tuple with a tensor inside, which raises."""

    values: torch.Tensor


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: {"a": [float("nan"), np.float64("nan")], "b": (torch.tensor(torch.nan), np.array([np.nan, 1]))},
        lambda: np.array([1, None, "x", float("nan"), {"k": np.arange(2)}], dtype=object),
        lambda: np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
        lambda: np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
        lambda: torch.zeros(2).as_subclass(Subclass),
        lambda: torch.zeros(0, 3),
        lambda: torch.ones(2, requires_grad=True) * 2,
        lambda: "text",
        lambda: [np.str_("text"), np.bytes_(b"text"), np.bool_(True), np.datetime64("NaT"), np.complex64(float("nan"))],
        lambda: {1, 2},
    ],
)
def test_equal_values_are_the_same(make: Any) -> None:
    assert same(make(), make())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, device="meta")),
        (np.zeros(2), np.array([0.0, np.nan])),
        (np.zeros(2), [0.0, 0.0]),
        (torch.zeros(2), np.zeros(2)),
        (Ragged(np.zeros(2), [0, 1, 2]), Ragged(np.zeros(2), [0, 2, 2])),
        (Holder(torch.zeros(2)), Holder(torch.zeros(2))),
    ],
)
def test_other_values_are_not_the_same(first: Any, second: Any) -> None:
    assert not same(first, second)


# --- ragged ------------------------------------------------------------------------------------------------------------


@QUICK
@given(RAGGED)
def test_ragged_rows_lie_between_their_offsets(ragged: Ragged) -> None:
    rows = list(ragged)
    assert len(ragged) == len(rows) == len(ragged.lengths)
    assert ragged.lengths == [len(row) for row in rows]
    assert all(same(ragged[row], rows[row]) and same(ragged[row - len(rows)], rows[row]) for row in range(len(rows)))
    assert all(shares_memory(row, ragged.values) for row in rows)
    assert type(ragged.offsets) is type(ragged.values)
    assert str(ragged.offsets.dtype).endswith("int64")
    if rows:
        assert same(Ragged.from_rows(rows), ragged)
        assert same(Ragged.from_rows(iter(rows)), ragged)


@QUICK
@given(RAGGED, st.slices(30))
def test_ragged_slices_are_those_of_the_rows(ragged: Ragged, part: slice) -> None:
    cut = ragged[part]
    assert same(list(cut), list(ragged)[part])
    assert part.step not in (None, 1) or shares_memory(cut, ragged)


@QUICK
@given(RAGGED, st.integers(0, 3))
def test_ragged_rows_are_filled_up_behind(ragged: Ragged, more: int) -> None:
    longest = max(ragged.lengths, default=0)
    assume(getattr(ragged.values.dtype, "kind", "tensor") not in "OMUS")
    full, mask = ragged.padded(1, longest + more)
    assert full.shape == (len(ragged), longest + more, *ragged.values.shape[1:])
    assert same(full[mask].detach() if isinstance(full, torch.Tensor) else full[mask], ragged.values)
    assert mask.sum(1).tolist() == ragged.lengths
    assert bool((full[~mask] == 1).all())
    assert same(ragged.padded(1)[0], full[:, :longest])


def test_ragged_of_objects_is_filled_up_with_what_is_asked_for() -> None:
    full, _ = Ragged(np.array(["a", "b", "c"]), [0, 1, 3]).padded("-")  # type: ignore[arg-type]
    assert full.tolist() == [["a", "-"], ["b", "c"]]


@pytest.mark.parametrize("values", [torch.arange(4), np.arange(4)], ids=["tensor", "array"])
@pytest.mark.parametrize(
    "offsets",
    [
        [0, 1, 4],
        (0, 1, 4),
        [np.int32(0), 1, 4],
        np.array([0, 1, 4], "u2"),
        np.array([4, 1, 0], ">i4")[::-1],
        torch.tensor([0, 1, 4], dtype=torch.int32),
        torch.tensor([0, 9, 1, 9, 4])[::2],
    ],
    ids=str,
)
def test_offsets_may_be_any_integers_and_are_copied(values: Any, offsets: Any) -> None:
    offsets = copy.deepcopy(offsets)
    ragged = Ragged(values, offsets)
    assert ragged.lengths == [1, 3]
    assert ragged.values is values
    if not isinstance(offsets, tuple):
        offsets[0] = 3
        assert ragged.lengths == [1, 3]


@pytest.mark.parametrize("values", [torch.arange(4), np.arange(4)], ids=["tensor", "array"])
@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ([], ValueError, "offsets go from 0 to the 4 values without falling, one more than there are rows; got []"),
        ([0, 3], ValueError, "got [0, 3]"),
        ([1, 4], ValueError, "got [1, 4]"),
        ([0, 5, 4], ValueError, "got [0, 5, 4]"),
        ([0, -1, 4], ValueError, "got [0, -1, 4]"),
        ([0, 1, 1, 1, 1, 1, 1, 1, 9], ValueError, "got [0, 1, 1, 1, 1, 1, 1, 1, ...]"),
        ([0, 2**62, 4], ValueError, "got [0, 4611686018427387904, 4]"),
        ([0, 2**63, 4], ValueError, "offsets of a ragged column: integers of at most 64 bits are needed"),
        (np.array([0, 2**64 - 1, 4], "u8"), ValueError, "got [0, -1, 4]"),
        ([0, 1.5, 4], TypeError, "offsets of a ragged column: an integer is needed, not 1.5"),
        (np.array([0.0, 4.0]), TypeError, "integers in one dimension are needed, not float64 of shape (2,)"),
        (torch.tensor([[0, 4]]), TypeError, "integers in one dimension are needed, not torch.int64 of shape (1, 2)"),
        (np.array([False, True]), TypeError, "not bool of shape (2,)"),
        (["a", "b"], TypeError, "an integer is needed, not 'a'"),
    ],
    ids=str,
)
def test_offsets_that_do_not_describe_the_values_are_refused(
    values: Any, offsets: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Ragged(values, offsets)


@pytest.mark.parametrize("values", [[1, 2], torch.tensor(1), "text", Ragged(torch.zeros(0), [0])], ids=repr)
def test_values_that_are_no_dense_column_are_refused(values: Any) -> None:
    with pytest.raises(TypeError, match="the values of a ragged column are a tensor or an array of \\(T, ...\\), not "):
        Ragged(values, [0, 2])


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], ValueError, "a ragged column is made of at least one row"),
        ([[1, 2], [3]], TypeError, "row 0 of a ragged column is a tensor or an array of (t, ...), not list"),
        ([torch.zeros(1), torch.tensor(1)], TypeError, "row 1 of a ragged column"),
        ([torch.zeros(1), np.zeros(1)], TypeError, "rows of a ragged column: parts of different kinds: array, tensor"),
        ([torch.zeros(1), torch.zeros(1).int()], TypeError, "rows of a ragged column: parts of different dtypes"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], ValueError, "rows of a ragged column: parts of different shapes of a row"),
    ],
)
def test_rows_that_make_no_ragged_column_are_refused(rows: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Ragged.from_rows(rows)


@pytest.mark.parametrize("row", [3, -4, 10**20, -(10**20)])
def test_ragged_rows_that_are_not_there_are_refused(row: int) -> None:
    with pytest.raises(IndexError, match=re.escape(f"row {row} of 3")):
        Ragged(torch.arange(3), [0, 1, 2, 3])[row]


def test_rows_longer_than_the_length_to_fill_up_to_are_refused() -> None:
    with pytest.raises(ValueError, match="a row has 3 values, which do not fit a length of 2"):
        Ragged(torch.arange(3), [0, 0, 3]).padded(length=2)


def test_a_ragged_column_is_frozen() -> None:
    ragged = Ragged(torch.arange(3), [0, 3])
    with pytest.raises(AttributeError, match="a Ragged is frozen; 'values' cannot be set"):
        ragged.values = torch.zeros(3)
    with pytest.raises(AttributeError, match="a Ragged is frozen; 'offsets' cannot be deleted"):
        del ragged.offsets


def test_a_ragged_column_tells_its_shape() -> None:
    assert repr(Ragged(torch.zeros(3, 2), [0, 3])) == "Ragged(1 rows, values (3, 2) torch.float32)"


@QUICK
@given(RAGGED)
def test_a_ragged_column_survives_pickling(ragged: Ragged) -> None:
    assume(pickles_as_it_is(ragged))
    assert same(pickle.loads(pickle.dumps(ragged, 5)), ragged)


# --- row numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        [2, 0, -1],
        (2, 0, 2),
        [np.int64(2), 0, torch.tensor(2)],
        np.array([2, 0, -1], "i1"),
        np.array([2, 0, 2], "u8"),
        torch.tensor([2, 0, -1]),
        RowNumbers([2, 0, 2], 3),
    ],
    ids=str,
)
def test_rows_may_be_told_by_any_integers(given: Any) -> None:
    assert RowNumbers(given, 3).numbers == [2, 0, 2]
    assert take([10, 11, 12], given) == [12, 10, 12]
    assert same(take(torch.tensor([10, 11, 12]), given), torch.tensor([12, 10, 12]))
    assert same(take(np.array([10, 11, 12]), given), np.array([12, 10, 12]))


@pytest.mark.parametrize(
    "given", [[True, False, True], np.array([True, False, True]), torch.tensor([True, False, True])], ids=repr
)
def test_booleans_are_a_mask(given: Any) -> None:
    assert RowNumbers(given, 3).numbers == [0, 2]


@pytest.mark.parametrize("given", [[], (), range(0), np.array([]), torch.tensor([]), np.array([], bool)], ids=repr)
def test_no_rows_can_be_told_by_anything_empty(given: Any) -> None:
    assert RowNumbers(given, 0).numbers == []


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([3], IndexError, "row 3 of 3"),
        ([0, -4], IndexError, "row -4 of 3"),
        (range(1, 5), IndexError, "row 4 of 3"),
        ([10**30], IndexError, f"row {10**30} of 3"),
        (np.array([2**64 - 1], "u8"), IndexError, f"row {2**64 - 1} of 3"),
        (RowNumbers([5], 6), IndexError, "row 5 of 3"),
        ([True], IndexError, "a mask of 1 rows for 3 rows"),
        (np.zeros(0, bool), IndexError, "a mask of 0 rows for 3 rows"),
        (torch.ones(4, dtype=torch.bool), IndexError, "a mask of 4 rows for 3 rows"),
        ([True, 1, False], TypeError, "by integers or by booleans (a mask), not by both at once"),
        ([1, True, False], TypeError, "by integers or by booleans (a mask), not by both at once"),
        ([1.0], TypeError, "an integer is needed, not 1.0"),
        (np.array([0.0]), TypeError, "an integer is needed, not 0.0"),
        (torch.tensor([0.0]), TypeError, "an integer is needed, not 0.0"),
        (["a"], TypeError, "an integer is needed, not 'a'"),
        ([None], TypeError, "an integer is needed, not None"),
        (torch.zeros(1, 1).int(), TypeError, "in one dimension, not by torch.int32 of shape (1, 1)"),
        (np.array(1), TypeError, "in one dimension, not by int64 of shape ()"),
        ("012", TypeError, "rows are told by integers or a mask, not by '012'"),
        (1.5, TypeError, "rows are told by integers or a mask, not by float 1.5"),
        (None, TypeError, "not by NoneType None"),
    ],
    ids=str,
)
def test_what_tells_no_rows_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        RowNumbers(given, 3)
