"""Test that batches become TensorDicts and come back, with each kind of column."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helmsman.api.batch import Batch
from helmsman.api.columns import Column, Ragged, same
from helmsman.api.errors import BackendNotInstalledError
from helmsman.api.parts import PerPart
from tests.api.columns import QUICK, ROWS, lists, raggeds, tensors


def tensordict_of(fields: dict[str, Any], batch_size: list[int]) -> Any:
    from tensordict import TensorDict  # takes a second, which the collection of tests is spared

    return TensorDict(fields, batch_size)


def sized(num_rows: int) -> st.SearchStrategy[Batch]:
    ragged_tensors = raggeds(num_rows).filter(
        lambda column: isinstance(column.values, torch.Tensor)
    )
    column = st.one_of(tensors(num_rows), lists(num_rows), ragged_tensors)
    drawn = st.dictionaries(st.sampled_from(["a", "keys", "batch_size", "x.y"]), column, max_size=3)
    metas = st.fixed_dictionaries(
        {}, optional={"step": st.integers(), "t": st.just(torch.tensor([1.0, torch.nan]))}
    )
    return st.builds(lambda columns, meta: Batch(columns, meta, num_rows=num_rows), drawn, metas)


@QUICK
@given(ROWS.flatmap(sized))
def test_tensordict_there_and_back(batch: Batch) -> None:
    tensordict = batch.to_tensordict()
    assert type(tensordict) is type(tensordict_of({}, [0]))
    assert tensordict.batch_size == (len(batch),)
    assert Batch.from_tensordict(tensordict).equals(batch)


def there_and_back(column: Column) -> Any:
    return Batch.from_tensordict(Batch({"a": column}).to_tensordict())["a"]


def test_tensordict_keeps_items_of_lists() -> None:
    for column in (
        *(
            [],
            ["x"],
            ["x", "x"],
            [1, None, ("a", 2), float("nan")],
            [[1, 2], [1, 2]],
            [{"x": 1}, {"y": [2]}],
        ),
        *([torch.zeros(2), torch.zeros(3)], [np.zeros(2), np.zeros(2)]),
    ):
        assert same(there_and_back(column), column)


def test_tensordict_of_number_arrays() -> None:
    for column in (
        np.arange(6.0).reshape(3, 2),
        np.zeros((3, 0), "f4"),
        np.array([True, False]),
        np.arange(3, dtype="u2"),
        np.arange(6)[::2],
        np.arange(3)[::-1],
        np.arange(3).astype(">i4"),
        np.broadcast_to(np.arange(1), (3,)),
    ):
        expected = torch.from_numpy(column.astype(column.dtype.newbyteorder("="), order="C"))
        assert same(there_and_back(column), expected)
        assert same(
            there_and_back(Ragged(column, [0, 0, len(column)])),
            Ragged(expected, [0, 0, len(column)]),
        )


def test_tensordict_shares_writable_memory() -> None:
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    columns = {
        "t": torch.zeros(3),
        "a": np.zeros(3),
        "r": Ragged(torch.zeros(3), [0, 1, 2, 3]),
        "read_only": read_only,
    }
    batch = Batch(columns)  # type: ignore[arg-type]
    tensordict = batch.to_tensordict()
    tensordict["t"][0] = tensordict["a"][1] = tensordict["read_only"][0] = 1
    tensordict["r"].values()[2] = 1
    assert [batch["t"].tolist(), batch["a"].tolist(), batch["r"].values.tolist()] == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]
    assert read_only.tolist() == [0, 0, 0]
    assert Batch.from_tensordict(tensordict)["t"].data_ptr() == batch["t"].data_ptr()


def test_tensordict_of_other_arrays() -> None:
    cases: list[tuple[Column, list[Any]]] = [
        (np.array(["a", "bc"]), ["a", "bc"]),
        (np.array([1, None], dtype=object), [1, None]),
        (np.array(["2026-01-01"], "datetime64[ns]"), [np.datetime64("2026-01-01", "ns")]),
        (np.ones(1, np.longdouble), [np.longdouble(1)]),
        (Ragged(np.array(["a", "b"]), [0, 2]), [np.array(["a", "b"])]),
    ]
    for column, items in cases:
        assert same(there_and_back(column), items)


def test_tensordict_meta_without_padding() -> None:
    meta = {"step": 3, "scale": torch.ones(5), "parts": PerPart((1, 2)), "meta": {"deep": 1}}
    tensordict = Batch({"a": torch.zeros(3)}, meta).pad(2).to_tensordict()
    assert tensordict.batch_size == (3,)
    assert same(dict(Batch.from_tensordict(tensordict).meta), meta)


def test_from_tensordict_foreign_entries() -> None:
    nested = torch.nested.nested_tensor([torch.arange(3), torch.arange(4)], layout=torch.jagged)
    starts, lengths = torch.tensor([1, 0]), torch.tensor([2, 3])
    gaps = torch.nested.narrow(
        torch.arange(12).reshape(2, 6), 1, starts, lengths, layout=torch.jagged
    )
    from tensordict import NonTensorStack

    tensordict = tensordict_of(
        {"nested": nested, "gaps": gaps, "stack": NonTensorStack("x", "y")}, [2]
    )
    tensordict["for_all"] = "text"
    batch = Batch.from_tensordict(tensordict)
    assert dict(batch.meta) == {"for_all": "text"}
    assert batch["stack"] == ["x", "y"]
    assert [row.tolist() for row in batch["nested"]] == [[0, 1, 2], [0, 1, 2, 3]]
    assert [row.tolist() for row in batch["gaps"]] == [[1, 2], [6, 7, 8]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Batch({"meta": torch.zeros(1)}, {"step": 1}).to_tensordict(),
            ValueError,
            (
                "a column is named 'meta', a key that the TensorDict needs for the batch's meta; "
                "rename the column"
            ),
        ),
        (
            lambda: Batch.from_tensordict({"a": 1}),
            TypeError,
            "expected a TensorDict, got a dict; for a plain dict, use Batch",
        ),
        (
            lambda: Batch.from_tensordict(tensordict_of({}, [2, 3])),
            ValueError,
            "has the batch size (2, 3); expected one dimension",
        ),
        (
            lambda: Batch.from_tensordict(tensordict_of({}, [])),
            ValueError,
            "the TensorDict has the batch size ()",
        ),
        (
            lambda: Batch.from_tensordict(
                tensordict_of({"deep": tensordict_of({"a": torch.zeros(2)}, [2])}, [2])
            ),
            TypeError,
            "entry 'deep' is a TensorDict itself; flatten it first (flatten_keys)",
        ),
    ],
)
def test_tensordict_invalid(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_tensordict_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch({"a": torch.zeros(1)})
    tensordict = batch.to_tensordict()
    monkeypatch.setitem(sys.modules, "tensordict", None)
    for make in (batch.to_tensordict, lambda: Batch.from_tensordict(tensordict)):
        with pytest.raises(
            BackendNotInstalledError, match=re.escape("pip install 'helmsman-rl[tensordict]'")
        ) as caught:
            make()
        assert caught.value.package == "tensordict"
