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
        made[name] = _as_entry(library, column)
    if meta:
        made.set_non_tensor(_META, dict(meta))
    return made


def _as_entry(library: Any, column: Column) -> Any:
    import torch

    if isinstance(column, Ragged):
        values, offsets = (_as_tensor(part) for part in (column.values, column.offsets))
        if values is not None:
            return torch.nested.nested_tensor_from_jagged(values, offsets.to(values.device))
    elif (tensor := _as_tensor(column)) is not None:
        return tensor
    texts = getattr(getattr(column, "dtype", None), "kind", "") in ("U", "S", "O")
    rows = column.tolist() if texts else list(column)  # type: ignore[union-attr]
    return library.NonTensorStack(*[library.NonTensorData(row) for row in rows])


def _as_tensor(column: Any) -> Any:
    """A tensor in the same memory, if torch can use it; a tensor of its own for arrays that are read-only, reversed or of the
    other byte order; None for what cannot be a tensor."""
    import torch

    kind = kind_of(column)
    if kind != "array":
        return column if kind == "tensor" else None
    if column.dtype.kind not in "biufc" or column.dtype.char in "gG":  # long doubles
        return None
    if not column.dtype.isnative or not column.flags.writeable or min(column.strides) < 0:
        column = column.astype(column.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(column)


def from_tensordict(tensordict: Any) -> tuple[dict[str, Column], dict[str, Any]]:
    """See Batch.from_tensordict."""
    library = _library()
    if not library.is_tensor_collection(tensordict):
        raise TypeError(f"a TensorDict is needed, not a {type(tensordict).__qualname__}; for plain dicts there is from_dict")
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
