"""Columns of every kind, for the property tests of columns and batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from helmsman.api.columns import Column, Ragged

QUICK = settings(max_examples=25)
ROWS = st.integers(0, 30)

TENSOR_DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
]
ARRAY_DTYPES = [
    "float32",
    "float16",
    "int64",
    "uint8",
    "bool",
    "complex64",
    ">i4",
    "datetime64[s]",
    "U3",
    "S4",
]


def _numbers(seed: int, num_rows: int, width: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (num_rows, *width))


def _tensor(
    seed: int, num_rows: int, width: tuple[int, ...], dtype: torch.dtype, layout: str
) -> torch.Tensor:
    made = torch.from_numpy(_numbers(seed, num_rows, width)).to(dtype)
    if dtype.is_floating_point:
        made[made == 7] = torch.nan
    if layout == "gaps":
        return torch.repeat_interleave(made, 2, 0)[::2] if dtype is not torch.uint16 else made
    if layout == "transposed" and width:
        return made.transpose(0, -1).contiguous().transpose(0, -1)
    return made.requires_grad_() if layout == "grad" and dtype.is_floating_point else made


def _array(
    seed: int, num_rows: int, width: tuple[int, ...], dtype: str, layout: str
) -> np.ndarray[Any, Any]:
    made = _numbers(seed, num_rows, width).astype(dtype)
    if made.dtype.kind == "f":
        made[made == 7] = np.nan
    if layout == "gaps":
        return np.repeat(made, 2, 0)[::2]
    if layout == "transposed":
        return np.asfortranarray(made)
    return np.ascontiguousarray(made[::-1])[::-1] if layout == "backwards" else made


def _objects(seed: int, num_rows: int) -> list[Any]:
    kinds = [
        None,
        "text",
        ("a", 1),
        {"x": [1, 2]},
        float("nan"),
        np.arange(3),
        torch.arange(2),
        7,
        True,
    ]
    return [kinds[(seed + row) % len(kinds)] for row in range(num_rows)]


def _object_array(seed: int, num_rows: int) -> np.ndarray[Any, Any]:
    made = np.empty(num_rows, dtype=object)
    for row, value in enumerate(_objects(seed, num_rows)):
        made[row] = value
    return made


SEEDS = st.integers(0, 1000)
WIDTHS = st.sampled_from([(), (1,), (3,), (0,), (2, 2)])


def tensors(num_rows: int) -> st.SearchStrategy[torch.Tensor]:
    layouts = st.sampled_from(["dense", "gaps", "transposed", "grad"])
    return st.builds(
        _tensor, SEEDS, st.just(num_rows), WIDTHS, st.sampled_from(TENSOR_DTYPES), layouts
    )


def arrays(num_rows: int) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    layouts = st.sampled_from(["dense", "gaps", "transposed", "backwards"])
    numbers = st.builds(
        _array, SEEDS, st.just(num_rows), WIDTHS, st.sampled_from(ARRAY_DTYPES), layouts
    )
    return numbers | st.builds(_object_array, SEEDS, st.just(num_rows))


def lists(num_rows: int) -> st.SearchStrategy[list[Any]]:
    return st.builds(_objects, SEEDS, st.just(num_rows))


@st.composite
def raggeds(draw: st.DrawFn, num_rows: int) -> Ragged:
    lengths = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=num_rows, max_size=num_rows))
    offsets = list(itertools.accumulate(lengths, initial=0))
    return Ragged(draw(tensors(offsets[-1]) | arrays(offsets[-1])), offsets)


def columns(num_rows: int) -> st.SearchStrategy[Column]:
    """Draw a column of any kind with this number of rows."""
    return st.one_of(tensors(num_rows), arrays(num_rows), lists(num_rows), raggeds(num_rows))


def pickles_as_it_is(column: Column) -> bool:
    """torch (2.13) does not unpickle uint16, NumPy (2.4) makes the byte order native."""
    if isinstance(column, list):
        return True
    values = column.values if isinstance(column, Ragged) else column
    return (
        values.dtype is not torch.uint16
        if isinstance(values, torch.Tensor)
        else values.dtype.isnative
    )
