"""Batches to and from TensorDict, for those who have the package tensordict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helmsman.api.columns import Column, Ragged, kind_of
from helmsman.api.errors import BackendNotInstalledError

_META = "meta"


def to_tensordict(columns: Mapping[str, Column], meta: Mapping[str, Any], num_rows: int) -> Any:
    """See Batch.to_tensordict."""
    library = _library()
    if _META in columns and meta:
        raise ValueError(f"a column is called {_META!r}, which is where a TensorDict would have the batch's meta; rename it")
    made = library.TensorDict({}, batch_size=[num_rows])
    for name, column in columns.items():
        made[name] = _as_entry(library, column)
    if meta:
        made.set_non_tensor(_META, dict(meta))
    return made


def _as_entry(library: Any, column: Column) -> Any:
    import torch

    if isinstance(column, Ragged):
        values, offsets = (torch.as_tensor(part) for part in (column.values, column.offsets))
        return torch.nested.nested_tensor_from_jagged(values, offsets.to(values.device))
    if kind_of(column) == "tensor":
        return column
    if kind_of(column) == "array" and column.dtype.kind in "biufc":  # type: ignore[union-attr]
        return torch.as_tensor(column)
    return library.NonTensorStack(*[library.NonTensorData(item) for item in column])


def from_tensordict(tensordict: Any) -> tuple[dict[str, Column], dict[str, Any]]:
    """See Batch.from_tensordict."""
    library = _library()
    if len(tensordict.batch_size) != 1:
        raise ValueError(f"the TensorDict has the batch size {tuple(tensordict.batch_size)}; rows are one dimension")
    columns: dict[str, Column] = {}
    meta: dict[str, Any] = {}
    for name in tensordict.keys():  # noqa: SIM118 - iterating over a TensorDict gives its rows
        value = tensordict.get(name)
        if isinstance(value, library.NonTensorStack):
            columns[name] = list(value.tolist())
        elif isinstance(value, library.NonTensorData):
            if name == _META and isinstance(value.data, dict):
                meta |= value.data
            else:
                meta[name] = value.data
        elif isinstance(value, library.TensorDictBase):
            raise TypeError(f"entry {name!r} is a TensorDict itself; flatten it first (flatten_keys)")
        elif getattr(value, "is_nested", False):
            columns[name] = Ragged(value.values(), value.offsets().cpu())
        else:
            columns[name] = value
    return columns, meta


def _library() -> Any:
    try:
        import tensordict
    except ImportError as error:
        raise BackendNotInstalledError(
            backend="Batch's way to and from TensorDict", package="tensordict", command="pip install 'helmsman[tensordict]'"
        ) from error
    return tensordict
