"""Conversion of a Batch's columns to and from a TensorDict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helmsman.api.columns import Column, Ragged, kind_of
from helmsman.api.extras import needed_by

_META = "meta"


def to_tensordict(columns: Mapping[str, Column], meta: Mapping[str, Any], num_rows: int) -> Any:
    """Convert columns to a TensorDict; see Batch.to_tensordict.

    Args:
        columns: Name -> column.
        meta: Entries that apply to all rows.
        num_rows: Number of rows.

    Returns:
        The TensorDict.

    Raises:
        BackendNotInstalledError: The package tensordict is missing.
        ValueError: A column is named 'meta' and there is meta.
    """
    library = _library()
    if _META in columns and meta:
        raise ValueError(
            f"a column is named {_META!r}, a key that the TensorDict needs for the batch's meta; "
            "rename the column"
        )
    made = library.TensorDict({}, batch_size=[num_rows])
    for name, column in columns.items():
        entry = _as_tensor(column)
        made[name] = (
            library.NonTensorStack(*map(library.NonTensorData, _as_items(column)))
            if entry is None
            else entry
        )
    if meta:
        made.set_non_tensor(_META, dict(meta))
    return made


def _as_items(column: Any) -> Any:
    return (
        column.tolist()
        if getattr(getattr(column, "dtype", None), "kind", "") in ("U", "S", "O")
        else column
    )


def _as_tensor(column: Any) -> Any:
    """Convert a column to a tensor in the same memory, if possible; None if it cannot be one.

    Read-only or reversed arrays and arrays of another byte order are copied.
    """
    import torch

    kind = kind_of(column)
    if kind == "ragged":
        values = _as_tensor(column.values)
        offsets = _as_tensor(column.offsets)
        return (
            None
            if values is None
            else torch.nested.nested_tensor_from_jagged(values, offsets.to(values.device))
        )
    if kind == "array" and column.dtype.kind in "biufc" and column.dtype.char not in "gG":
        # Long doubles (g, G) have no torch dtype.
        if not column.dtype.isnative or not column.flags.writeable or min(column.strides) < 0:
            column = column.astype(column.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(column)
    return column if kind == "tensor" else None


def from_tensordict(tensordict: Any) -> tuple[dict[str, Column], dict[str, Any]]:
    """Convert a TensorDict to columns and meta; see Batch.from_tensordict.

    Raises:
        BackendNotInstalledError: The package tensordict is missing.
        ValueError: The batch size does not have one dimension.
        TypeError: It is not a TensorDict, or contains another one.
    """
    library = _library()
    if not library.is_tensor_collection(tensordict):
        raise TypeError(
            f"expected a TensorDict, got a {type(tensordict).__qualname__}; for a plain dict, use "
            "Batch(columns)"
        )
    if len(tensordict.batch_size) != 1:
        raise ValueError(
            f"the TensorDict has the batch size {tuple(tensordict.batch_size)}; expected one "
            "dimension, the rows"
        )
    columns: dict[str, Column] = {}
    meta: dict[str, Any] = {}
    for name in tensordict.keys():  # noqa: SIM118 - iterating over a TensorDict gives its rows
        value = tensordict.get(name)
        if isinstance(value, library.NonTensorStack):
            columns[name] = value.tolist()
        elif isinstance(value, library.NonTensorData):
            meta |= (
                value.data if name == _META and isinstance(value.data, dict) else {name: value.data}
            )
        elif library.is_tensor_collection(value):
            raise TypeError(
                f"entry {name!r} is a TensorDict itself; flatten it first (flatten_keys)"
            )
        elif getattr(value, "is_nested", False):
            # A view (narrowed, transposed) may have values between its rows, or transposed rows.
            is_plain = "jagged" in str(value.layout) and value.is_contiguous()
            columns[name] = (
                Ragged(value.values(), value.offsets())
                if is_plain
                else Ragged.from_rows(value.unbind())
            )
        else:
            columns[name] = value
    return columns, meta


def _library() -> Any:
    with needed_by("Batch's way to and from TensorDict", "tensordict"):
        import tensordict
    return tensordict
