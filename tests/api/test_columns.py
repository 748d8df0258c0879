"""Tests of columns: ragged rows, joining, equality and row numbers."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from helmsman.api.columns import (
    Column,
    Ragged,
    concat_columns,
    kind_of,
    own,
    row_numbers,
    same,
    take,
)
from tests.api.columns import QUICK, ROWS, columns, pickles_as_it_is, raggeds

RAGGED = ROWS.flatmap(raggeds)


# --- every kind -----------------------------------------------------------------------------------


@QUICK
@given(ROWS.flatmap(columns))
def test_column_and_its_copies(column: Column) -> None:
    copied = take(column, range(len(column)))
    half = column[: len(column) // 2]
    assert same(column, copied) and same(copied, column)
    assert same(concat_columns([half, column[len(column) // 2 :]]), column)
    assert len(column) == len(half) or not same(column, half)
    for part in (column, half):
        kept = own(part)
        assert same(kept, part)
        if isinstance(part, torch.Tensor):
            assert kept.untyped_storage().nbytes() <= part.numel() * part.element_size()


def test_kind_of() -> None:
    assert kind_of(torch.zeros(2)) == kind_of(torch.nn.Parameter(torch.zeros(2))) == "tensor"
    assert kind_of(np.zeros(2)) == "array"
    assert kind_of([]) == "list"
    assert kind_of(Ragged(torch.zeros(0), [0])) == "ragged"
    nested = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
    for other in (
        torch.tensor(1),
        np.array(1),
        1,
        "text",
        (1, 2),
        {"a": 1},
        None,
        torch.eye(2).to_sparse(),
        nested,
    ):
        assert kind_of(other) == ""


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64]
)
def test_columns_of_dtypes_with_few_kernels(dtype: torch.dtype) -> None:
    column = torch.arange(6).to(torch.float32).to(dtype)
    assert same(concat_columns([column[:2], column[2:]]), column)
    for taken in (take(column, [5, 0]), take(Ragged(column, [0, 1, 5, 6]), [2, 0]).values):
        assert same(taken.to(torch.float32), torch.tensor([5.0, 0.0]))


def test_concat_columns_gradients() -> None:
    weights = torch.ones(4, 2, requires_grad=True)
    joined: Any = concat_columns(
        [weights[:2], take(weights, [3, 3]), take(Ragged(weights, [0, 1, 4]), [1]).values]
    )
    joined.sum().backward()
    assert weights.grad is not None
    assert weights.grad[:, 0].tolist() == [1, 2, 1, 3]


# --- joining --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([torch.zeros(1), [1]], TypeError, "parts differ in kinds: tensor, list"),
        ([torch.zeros(1), 3], TypeError, "parts differ in kinds: tensor, int"),
        (
            [torch.zeros(1), torch.zeros(1, dtype=torch.int64)],
            TypeError,
            "dtypes: torch.float32, torch.int64",
        ),
        ([np.zeros(1), np.zeros(1, "f4")], TypeError, "dtypes: float32, float64"),
        ([np.zeros(1, "U1"), np.zeros(1, "S1")], TypeError, "dtypes: <U1, |S1"),
        ([torch.zeros(0), torch.zeros(1, 3)], ValueError, "row shapes: (), (3,)"),
        ([np.zeros((1, 2)), np.zeros((1, 3))], ValueError, "row shapes: (2,), (3,)"),
        ([torch.zeros(1), torch.zeros(1, device="meta")], ValueError, "devices: cpu, meta"),
        (
            [Ragged(torch.zeros(1), [0, 1]), Ragged(np.zeros(1), [0, 1])],
            TypeError,
            "kinds: tensor, array",
        ),
        (
            [Ragged(torch.zeros(1), [0, 1]), Ragged(torch.zeros(1, 2), [0, 1])],
            ValueError,
            "row shapes: (), (2,)",
        ),
    ],
)
def test_concat_columns_different_parts(
    parts: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(
        error,
        match=re.escape(f"column 'a': parts differ in {message.removeprefix('parts differ in ')}"),
    ):
        concat_columns(parts, "column 'a': ")


def test_concat_columns_of_texts_of_different_lengths() -> None:
    for texts in (["a", "long"], [b"a", b"long"]):
        joined: Any = concat_columns([np.array([text]) for text in texts])
        assert joined.tolist() == texts


# --- equality -------------------------------------------------------------------------------------


@dataclass
class Holder:
    """A dataclass with a tensor, whose == raises as that of a tuple of tensors."""

    values: torch.Tensor


class Subclass(torch.Tensor):
    pass


EQUAL: list[Callable[[], Any]] = [
    lambda: {
        "a": [float("nan"), np.float64("nan")],
        "b": (torch.tensor(torch.nan), np.array([np.nan, 1])),
    },
    lambda: np.array([1, None, "x", float("nan"), {"k": np.arange(2)}], dtype=object),
    lambda: np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
    lambda: np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
    lambda: torch.zeros(2).as_subclass(Subclass),
    lambda: torch.zeros(0, 3),
    lambda: torch.ones(2, requires_grad=True) * 2,
    lambda: [
        np.str_("text"),
        np.bytes_(b"text"),
        np.bool_(True),
        np.datetime64("NaT"),
        np.complex64(float("nan")),
    ],
    lambda: ["text", {1, 2}, float("nan")],
]
DIFFERENT: list[tuple[Any, Any]] = [
    (1, 1.0),
    ([1], [1, 2]),
    ({"a": 1}, {"b": 1}),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.zeros(2), torch.zeros(1, 2)),
    (torch.zeros(2), torch.zeros(2, device="meta")),
    (np.zeros(2), np.array([0.0, np.nan])),
    (torch.zeros(2), np.zeros(2)),
    (Ragged(np.zeros(2), [0, 1, 2]), Ragged(np.zeros(2), [0, 2, 2])),
    (Holder(torch.zeros(2)), Holder(torch.zeros(2))),
]


def test_same() -> None:
    for make in EQUAL:
        assert same(make(), make()), make()
    for first, second in DIFFERENT:
        assert not same(first, second), (first, second)


# --- ragged ---------------------------------------------------------------------------------------


@QUICK
@given(RAGGED, st.slices(30))
def test_ragged_rows(ragged: Ragged, part: slice) -> None:
    rows, bounds = list(ragged), ragged.offsets.tolist()
    assert len(ragged) == len(rows)
    assert all(same(row, ragged.values[bounds[at] : bounds[at + 1]]) for at, row in enumerate(rows))
    assert all(
        same(ragged[at], rows[at]) and same(ragged[at - len(rows)], rows[at])
        for at in range(len(rows))
    )
    assert same(list(ragged[part]), rows[part])
    assert type(ragged.offsets) is type(ragged.values) and str(ragged.offsets.dtype).endswith(
        "int64"
    )
    assert not rows or same(Ragged.from_rows(iter(rows)), ragged)
    assume(pickles_as_it_is(ragged))
    assert same(pickle.loads(pickle.dumps(ragged, 5)), ragged)


def test_ragged_offsets_of_any_integers() -> None:
    for values in (torch.arange(4), np.arange(4)):
        for given_offsets in (
            [0, 1, 4],
            (0, 1, 4),
            [np.int32(0), torch.tensor(1), 4],
            np.array([0, 1, 4], "u2"),
            np.array([4, 1, 0], ">i4")[::-1],
            torch.tensor([0, 9, 1, 9, 4], dtype=torch.int32)[::2],
        ):
            offsets: Any = copy.deepcopy(given_offsets)
            ragged = Ragged(values, offsets)
            assert ragged.values is values
            if not isinstance(offsets, tuple):
                offsets[0] = 3
            assert ragged.offsets.tolist() == [0, 1, 4]


FOUR, JAGGED = torch.arange(4), Ragged(torch.arange(3), [0, 1, 2, 3])
NO_VALUES = "the values of a ragged column are a tensor or an array of (t, ...), not "
RAGGED_REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *(
        (
            (lambda offsets=offsets: Ragged(FOUR, offsets)),
            ValueError,
            f"offsets are {shown}; expected non-decreasing numbers from 0 to 4, the number of",
        )  # type: ignore[misc]
        for offsets, shown in [
            *((wrong, str(wrong)) for wrong in ([], [0, 3], [1, 4], [0, 5, 4], [0, -1, 4])),
            ([0, 1, 1, 1, 1, 1, 1, 1, 9], "[0, 1, 1, 1, 1, 1, 1, 1, ...]"),
            (np.array([0, 2**64 - 1, 4], "u8"), f"[0, {2**64 - 1}, 4]"),
        ]
    ),
    (
        lambda: Ragged(FOUR, [0, 1.5, 4]),  # type: ignore[list-item]
        TypeError,
        "offsets of a ragged column: expected an integer, got 1.5",
    ),
    (lambda: Ragged(FOUR, np.array([0.0, 4.0])), TypeError, "expected an integer, got 0.0"),
    (lambda: Ragged(FOUR, torch.tensor([[0, 4]])), TypeError, "expected an integer, got [0, 4]"),
    (lambda: Ragged(FOUR, np.array([False, True])), TypeError, "expected an integer, got False"),
    *(
        ((lambda values=values: Ragged(values, [0, 2])), TypeError, NO_VALUES)  # type: ignore[misc]
        for values in ([1, 2], torch.tensor(1), "text", Ragged(torch.zeros(0), [0]))
    ),
    (lambda: Ragged.from_rows([]), ValueError, "from_rows needs at least one row"),
    (
        lambda: Ragged.from_rows([[1]]),  # type: ignore[list-item]
        TypeError,
        "row 0 of a ragged column is a tensor or an array of (t, ...), not list",
    ),
    (
        lambda: Ragged.from_rows([torch.zeros(1), torch.tensor(1)]),
        TypeError,
        "row 1 of a ragged column",
    ),
    (
        lambda: Ragged.from_rows([FOUR, np.zeros(1)]),
        TypeError,
        "rows of a ragged column: parts differ in kinds",
    ),
    (
        lambda: Ragged.from_rows([torch.zeros(1, 2), torch.zeros(1, 3)]),
        ValueError,
        "parts differ in row shapes",
    ),
    *(
        ((lambda row=row: JAGGED[row]), IndexError, f"row {row} does not exist; there are 3 rows")
        for row in (3, -4, 10**20)
    ),  # type: ignore[misc]
    (lambda: JAGGED[True], TypeError, "expected an integer, got True"),
    (
        lambda: setattr(JAGGED, "values", FOUR),
        AttributeError,
        "a Ragged is frozen; 'values' cannot be set",
    ),
    (
        lambda: delattr(JAGGED, "offsets"),
        AttributeError,
        "a Ragged is frozen; 'offsets' cannot be deleted",
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "message"), RAGGED_REFUSED, ids=[message for _, _, message in RAGGED_REFUSED]
)
def test_ragged_invalid_arguments(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


# --- row numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        *(
            (given, [2, 0, 2])
            for given in ([2, 0, -1], (2, 0, 2), [np.int64(2), 0, torch.tensor(2)])
        ),
        *(
            (given, [2, 0, 2])
            for given in (
                np.array([2, 0, -1], "i1"),
                np.array([2, 0, 2], "u8"),
                torch.tensor([2, 0, -1]),
            )
        ),
        *(
            (mask, [0, 2])
            for mask in (
                [True, False, True],
                np.array([1, 0, 1], bool),
                torch.tensor([1, 0, 1]).bool(),
            )
        ),
        *((empty, []) for empty in ([], (), range(0), np.array([]), torch.tensor([]))),  # type: ignore[var-annotated]
    ],
    ids=repr,
)
def test_row_numbers(given: Any, numbers: list[int]) -> None:
    assert row_numbers(given, 3) == numbers


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([3], IndexError, "row 3 does not exist; there are 3 rows"),
        ([0, -4], IndexError, "row -4 does not exist; there are 3 rows"),
        (
            np.array([2**64 - 1], "u8"),
            IndexError,
            f"row {2**64 - 1} does not exist; there are 3 rows",
        ),
        ([True], IndexError, "the mask has 1 entries for 3 rows"),
        (torch.ones(4, dtype=torch.bool), IndexError, "the mask has 4 entries for 3 rows"),
        ([True, 1, False], TypeError, "expected an integer, got True"),
        ([1.0], TypeError, "expected an integer, got 1.0"),
        (
            np.array(1),
            TypeError,
            "rows are given as integers or a mask, not as numpy.ndarray array(1)",
        ),
        ("012", TypeError, "expected an integer, got '0'"),
        (1.5, TypeError, "rows are given as integers or a mask, not as float 1.5"),
        (None, TypeError, "not as NoneType None"),
    ],
    ids=str,
)
def test_row_numbers_invalid(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        row_numbers(given, 3)
