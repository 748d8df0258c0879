"""Batches to and from TensorDict, for those who have the package tensordict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helmsman.api.columns import Column, Ragged, kind_of
from helmsman.api.extras import needed_by

_META = "meta"


def to_tensordict(columns: Mapping[str, Column], meta: Mapping[str, Any], num_rows: int) -> Any:
    """See Batch.to_tensordict."""
    library = _library()
    if _META in columns and meta:
        raise ValueError(f"a column is called {_META!r}, which is where a TensorDict would have the batch's meta; rename it")
    made = library.TensorDict({}, batch_size=[num_rows])
    for name, column in columns.items():
        entry = _as_tensor(column)
        made[name] = library.NonTensorStack(*map(library.NonTensorData, _as_items(column))) if entry is None else entry
    if meta:
        made.set_non_tensor(_META, dict(meta))
    return made


def _as_items(column: Any) -> Any:
    return column.tolist() if getattr(getattr(column, "dtype", None), "kind", "") in ("U", "S", "O") else column


def _as_tensor(column: Any) -> Any:
    """A tensor in the same memory, if torch can use it; a tensor of its own for arrays that are read-only, reversed or of the
    other byte order; None for what cannot be a tensor."""
    import torch

    kind = kind_of(column)
    if kind == "ragged":
        values = _as_tensor(column.values)
        offsets = _as_tensor(column.offsets)
        return None if values is None else torch.nested.nested_tensor_from_jagged(values, offsets.to(values.device))
    if kind == "array" and column.dtype.kind in "biufc" and column.dtype.char not in "gG":  # long doubles
        if not column.dtype.isnative or not column.flags.writeable or min(column.strides) < 0:
            column = column.astype(column.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(column)
    return column if kind == "tensor" else None


def from_tensordict(tensordict: Any) -> tuple[dict[str, Column], dict[str, Any]]:
    """See Batch.from_tensordict."""
    library = _library()
    if not library.is_tensor_collection(tensordict):
        raise TypeError(f"a TensorDict is needed, not a {type(tensordict).__qualname__}; of a plain dict make a Batch")
    if len(tensordict.batch_size) != 1:
        raise ValueError(f"the TensorDict has the batch size {tuple(tensordict.batch_size)}; rows are one dimension")
    columns: dict[str, Column] = {}
    meta: dict[str, Any] = {}
    for name in tensordict.keys():  # noqa: SIM118 - iterating over a TensorDict gives its rows
        value = tensordict.get(name)
        if isinstance(value, library.NonTensorStack):
            columns[name] = value.tolist()
        elif isinstance(value, library.NonTensorData):
            meta |= value.data if name == _META and isinstance(value.data, dict) else {name: value.data}
        elif library.is_tensor_collection(value):
            raise TypeError(f"entry {name!r} is a TensorDict itself; flatten it first (flatten_keys)")
        elif getattr(value, "is_nested", False):
            # One that is a view (narrowed, transposed) has values between its rows, or the other way round.
            is_plain = "jagged" in str(value.layout) and value.is_contiguous()
            columns[name] = Ragged(value.values(), value.offsets()) if is_plain else Ragged.from_rows(value.unbind())
        else:
            columns[name] = value
    return columns, meta


def _library() -> Any:
    with needed_by("Batch's way to and from TensorDict", "tensordict"):
        import tensordict
    return tensordict
