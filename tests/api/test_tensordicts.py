"""Batches go to TensorDict and back, each kind of column as what TensorDict has for it."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from helmsman.api.batch import Batch, PerPart
from helmsman.api.columns import Column, Ragged, same
from helmsman.api.errors import BackendNotInstalledError
from tests.api.columns import QUICK, ROWS, lists, raggeds, tensors


def tensor_columns(num_rows: int) -> st.SearchStrategy[Column]:
    ragged_tensors = raggeds(num_rows).filter(lambda column: isinstance(column.values, torch.Tensor))
    return st.one_of(tensors(num_rows), lists(num_rows), ragged_tensors)


def sized(num_rows: int) -> st.SearchStrategy[Batch]:
    drawn = st.dictionaries(st.sampled_from(["a", "keys", "batch_size", "x.y"]), tensor_columns(num_rows), max_size=3)
    metas = st.fixed_dictionaries({}, optional={"step": st.integers(), "t": st.just(torch.tensor([1.0, torch.nan]))})
    return st.builds(lambda columns, meta: Batch(columns, meta, num_rows=num_rows), drawn, metas)


@QUICK
@given(ROWS.flatmap(sized))
def test_a_batch_of_tensors_and_lists_goes_there_and_back(batch: Batch) -> None:
    tensordict = batch.to_tensordict()
    assert isinstance(tensordict, TensorDict)
    assert tensordict.batch_size == (len(batch),)
    assert Batch.from_tensordict(tensordict).equals(batch)


def there_and_back(column: Column) -> Any:
    return Batch.from_tensordict(Batch({"a": column}).to_tensordict())["a"]


@pytest.mark.parametrize(
    "column",
    [
        [],
        ["x"],
        ["x", "x"],
        [1, None, ("a", 2), float("nan")],
        [[1, 2], [1, 2]],
        [{"x": 1}, {"y": [2]}],
        [torch.zeros(2), torch.zeros(3)],
        [np.zeros(2), np.zeros(2)],
    ],
    ids=repr,
)
def test_lists_keep_their_items(column: list[Any]) -> None:
    assert same(there_and_back(column), column)


@pytest.mark.parametrize(
    "column",
    [
        np.arange(6.0).reshape(3, 2),
        np.zeros((3, 0), "f4"),
        np.array([True, False]),
        np.arange(3, dtype="u2"),
        np.arange(6)[::2],
        np.arange(3)[::-1],
        np.arange(3).astype(">i4"),
        np.broadcast_to(np.arange(1), (3,)),
    ],
    ids=repr,
)
def test_arrays_of_numbers_become_tensors(column: np.ndarray[Any, Any]) -> None:
    found = there_and_back(column)
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == column.tolist()
    assert str(found.dtype) == f"torch.{column.dtype.newbyteorder('=')}"
    ragged = there_and_back(Ragged(column, [0, 0, len(column)]))
    assert isinstance(ragged, Ragged)
    assert ragged.lengths == [0, len(column)]
    assert ragged.values.tolist() == column.tolist()


def test_memory_is_shared() -> None:
    batch = Batch({"t": torch.zeros(3), "a": np.zeros(3), "r": Ragged(torch.zeros(3), [0, 1, 2, 3])})
    tensordict = batch.to_tensordict()
    tensordict["t"][0] = tensordict["a"][1] = 1
    tensordict["r"].values()[2] = 1
    assert [batch["t"].tolist(), batch["a"].tolist(), batch["r"].values.tolist()] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert Batch.from_tensordict(tensordict)["t"].data_ptr() == batch["t"].data_ptr()


def test_arrays_that_are_read_only_are_copied() -> None:
    column = np.zeros(3)
    column.flags.writeable = False
    Batch({"a": column}).to_tensordict()["a"][0] = 1
    assert column.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("column", "items"),
    [
        (np.array(["a", "bc"]), ["a", "bc"]),
        (np.array([1, None], dtype=object), [1, None]),
        (np.array(["2026-01-01"], "datetime64[ns]"), [np.datetime64("2026-01-01", "ns")]),
        (np.ones(1, np.longdouble), [np.longdouble(1)]),
        (Ragged(np.array(["a", "b"]), [0, 2]), [np.array(["a", "b"])]),
    ],
    ids=repr,
)
def test_what_cannot_be_a_tensor_becomes_a_list(column: Column, items: list[Any]) -> None:
    assert same(there_and_back(column), items)


def test_padding_stays_behind_and_meta_goes_along() -> None:
    meta = {"step": 3, "scale": torch.ones(5), "parts": PerPart((1, 2)), "meta": {"deep": 1}}
    tensordict = Batch({"a": torch.zeros(3)}, meta).pad(2).to_tensordict()
    assert tensordict.batch_size == (3,)
    assert same(dict(Batch.from_tensordict(tensordict).meta), meta)


def test_entries_that_somebody_else_made_are_understood() -> None:
    tensordict = TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2])
    tensordict["for_all"] = "text"
    tensordict["stack"] = NonTensorStack("x", "y")
    nested = torch.nested.nested_tensor([torch.arange(3), torch.arange(4)], layout=torch.jagged)
    tensordict["nested"] = nested
    batch = Batch.from_tensordict(tensordict)
    assert dict(batch.meta) == {"for_all": "text"}
    assert batch["stack"] == ["x", "y"]
    assert [row.tolist() for row in batch["nested"]] == [[0, 1, 2], [0, 1, 2, 3]]


def test_nested_tensors_with_gaps_between_their_rows_are_read_row_by_row() -> None:
    whole = torch.arange(12).reshape(2, 6)
    starts, lengths = torch.tensor([1, 0]), torch.tensor([2, 3])
    nested = torch.nested.narrow(whole, 1, starts, lengths, layout=torch.jagged)
    batch = Batch.from_tensordict(TensorDict({"a": nested}, batch_size=[2]))
    assert [row.tolist() for row in batch["a"]] == [[1, 2], [6, 7, 8]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Batch({"meta": torch.zeros(1)}, {"step": 1}).to_tensordict(),
            ValueError,
            "a column is called 'meta', which is where a TensorDict would have the batch's meta; rename it",
        ),
        (lambda: Batch.from_tensordict({"a": 1}), TypeError, "a TensorDict is needed, not a dict; for plain dicts there is"),
        (
            lambda: Batch.from_tensordict(TensorDict({}, [2, 3])),
            ValueError,
            "the TensorDict has the batch size (2, 3); rows are",
        ),
        (lambda: Batch.from_tensordict(TensorDict({}, [])), ValueError, "the TensorDict has the batch size ()"),
        (
            lambda: Batch.from_tensordict(TensorDict({"deep": TensorDict({"a": torch.zeros(2)}, [2])}, [2])),
            TypeError,
            "entry 'deep' is a TensorDict itself; flatten it first (flatten_keys)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_without_the_package_the_error_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch({"a": torch.zeros(1)})
    tensordict = batch.to_tensordict()
    monkeypatch.setitem(sys.modules, "tensordict", None)
    for make in (batch.to_tensordict, lambda: Batch.from_tensordict(tensordict)):
        with pytest.raises(BackendNotInstalledError, match=re.escape("pip install 'helmsman[tensordict]'")) as caught:
            make()
        assert caught.value.package == "tensordict"


def test_the_package_is_loaded_when_it_is_asked_for_and_says_itself_what_it_lacks() -> None:
    code = (
        "import sys, torch; from helmsman.api.batch import Batch\n"
        "batch = Batch({'a': torch.zeros(3), 'l': [1, 2, 3]}).pad(2).unpad()\n"
        "assert 'tensordict' not in sys.modules\n"
        "sys.modules['numpy'] = None\n"
        "try: batch.to_tensordict()\n"
        "except ModuleNotFoundError as error: assert error.name == 'numpy', error\n"
        "else: sys.exit('it was found')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
