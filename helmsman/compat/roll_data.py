"""ROLL's DataProto on Helmsman's Batch, and ROLL's functions on rows. Requires tensordict."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy

from helmsman.api.batch import Batch
from helmsman.api.columns import kind_of

Names: TypeAlias = str | Sequence[str] | None


class DataProto:
    """Rows of tensors and objects, and metadata; ``rows`` is a Batch of them.

    Args:
        batch: A TensorDict of batch size (N,), or name -> tensor (N, ...); None for no tensors.
        non_tensor_batch: Name -> array (N, ...) of any dtype.
        meta_info: Entries that apply to all rows.
    """

    def __init__(
        self,
        batch: Any = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(batch, dict):
            batch = Batch(batch).to_tensordict() if batch else None
        self.batch = batch
        self.non_tensor_batch, self.meta_info = dict(non_tensor_batch or {}), dict(meta_info or {})
        self.check_consistency()

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Any = None) -> DataProto:
        """Return rows of tensors, arrays, and lists of objects, which become arrays of objects."""
        tensors = {name: each for name, each in data.items() if kind_of(each) == "tensor"}
        others = {name: _objects(each) for name, each in data.items() if name not in tensors}
        return cls(tensors, others, meta_info)

    @classmethod
    def from_dict(
        cls, tensors: Mapping[str, Any], non_tensors: Any = None, meta_info: Any = None
    ) -> DataProto:
        """Return rows of tensors, and of arrays or lists of objects."""
        return cls.from_single_dict({**tensors, **(non_tensors or {})}, meta_info)

    @classmethod
    def from_rows(cls, rows: Batch) -> DataProto:
        """Return a Batch's rows without its padding; tensors and arrays share memory."""
        return cls.from_single_dict(rows.unpad().columns, rows.meta)

    @property
    def rows(self) -> Batch:
        """The same columns, in the same memory, and metadata."""
        return Batch({**self._tensors(), **self.non_tensor_batch}, self.meta_info)

    def check_consistency(self) -> None:
        """Raise ValueError if columns have different lengths."""
        len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: Any) -> Any:
        """Return a column by its name, or rows by an index, a slice, indices or a mask."""
        if isinstance(item, str):
            return self.rows[item]
        if not isinstance(item, slice) and numpy.ndim(item) == 0:
            row = operator.index(item)
            item = slice(row, row + 1 or None)
        return self.from_rows(self.rows[item] if isinstance(item, slice) else self.rows.take(item))

    def select(
        self,
        batch_keys: Names = None,
        non_tensor_batch_keys: Names = None,
        meta_info_keys: Names = None,
    ) -> DataProto:
        """Return the named columns and entries, which share memory; None names all of a kind."""
        values = (self._tensors(), self.non_tensor_batch, self.meta_info)
        keys = (batch_keys, non_tensor_batch_keys, meta_info_keys)
        return DataProto(*map(_chosen, values, keys))

    def pop(
        self,
        batch_keys: Names = None,
        non_tensor_batch_keys: Names = None,
        meta_info_keys: Names = None,
    ) -> DataProto:
        """Remove the named columns and entries, all or none of them, and return them."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        for name in popped._tensors():
            del self.batch[name]
        for kind in ("non_tensor_batch", "meta_info"):
            for name in getattr(popped, kind):
                del getattr(self, kind)[name]
        return popped

    def rename(self, old_keys: Names = None, new_keys: Names = None) -> DataProto:
        """Rename columns in place to as many new names, and return these rows."""
        names = dict(zip(_listed(old_keys), _listed(new_keys), strict=True))
        return self._become(self.rows.rename(names))

    def union(self, other: DataProto) -> DataProto:
        """Add another's columns and entries in place, unless values differ; return these rows."""
        return self._become(self.rows.union(other.rows))

    def reorder(self, indices: Any) -> None:
        """Permute the rows in place."""
        self._become(self.rows.reorder(indices))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Return copies of the rows: of each together if ``interleave``, else of all in turn."""
        return self.from_rows(self.rows.repeat(repeat_times, interleave=interleave))

    def to(self, device: Any) -> DataProto:
        """Move the tensors in place, and return these rows."""
        self.batch = None if self.batch is None else self.batch.to(device)
        return self

    def clone(self) -> DataProto:
        """Return a copy that shares nothing."""
        return copy.deepcopy(self)

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cut into parts; the first have one row more if the rows do not divide."""
        return [*map(self.from_rows, self.rows.chunk(chunks, "uneven"))]

    def group_by(self, keys: str | Sequence[str]) -> dict[str, DataProto]:
        """Group rows by the texts of their values in some columns, joined by '|'."""
        columns = self.rows.select(*_listed(keys)).columns.values()
        texts = [numpy.asarray(column).astype(str).tolist() for column in columns]
        groups: dict[str, list[int]] = {}
        for row, values in enumerate(zip(*texts, strict=True)):
            groups.setdefault("|".join(values), []).append(row)
        return {text: self[rows] for text, rows in groups.items()}

    @staticmethod
    def concat(
        data: Sequence[DataProto], *, global_keys: Collection[str] = ("metrics",)
    ) -> DataProto:
        """Return all rows, with the first part's metadata, but for ``metrics`` and ``global_keys``.

        All values of such an entry become one list; of dicts, those of each name.
        """
        meta = dict(data[0].meta_info)
        for name in {*global_keys, "metrics"}:
            values = [each.meta_info[name] for each in data if name in each.meta_info]
            if values:
                meta[name] = _merged(values)
        rows = Batch.concat([each.rows.without_meta() for each in data])
        return DataProto.from_single_dict(rows.columns, meta)

    def _tensors(self) -> dict[str, Any]:
        return {} if self.batch is None else dict(self.batch.items())

    def _become(self, rows: Batch) -> DataProto:
        vars(self).update(vars(self.from_rows(rows)))
        return self


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Return new rows with copies of the last one appended, and the number of these copies."""
    rows = data.rows.pad(size_divisor)
    return DataProto.from_single_dict(rows.columns, rows.meta), rows.num_padding


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the rows without the last ``pad_size``; they share memory."""
    return DataProto.from_rows(data.rows[: len(data) - pad_size])


def custom_np_concatenate(val: Sequence[Any]) -> Any:
    """Join arrays; those whose rows differ in shape become one array of objects."""
    if len({each.shape[1:] for each in val}) == 1:
        return numpy.concatenate(val)
    return _objects([row for each in val for row in each])


def reduce_metrics(
    metrics: dict[str, Any], reduce_func: Callable[..., Any] = numpy.mean
) -> dict[str, Any]:
    """Reduce lists and arrays in place, and return the metrics.

    Args:
        metrics: Name -> a number, or values. The end of a name, as in 'loss@max', chooses the
            function: mean, max, min, std, sum, or a percentile such as p50.
        reduce_func: The function for other names.
    """
    for name, values in metrics.items():
        if isinstance(values, (list, tuple, numpy.ndarray)) and len(values):
            tag = re.search("[@_](?:p([0-9]+)|(mean|max|min|std|sum))$", name)
            if tag and tag[1]:
                metrics[name] = numpy.percentile(values, int(tag[1]))
            else:
                metrics[name] = (getattr(numpy, tag[2]) if tag else reduce_func)(values)
    return metrics


def _objects(column: Any) -> Any:
    if isinstance(column, numpy.ndarray):
        return column
    return numpy.fromiter(column, dtype=object, count=len(column))


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _chosen(values: Mapping[str, Any], names: Names) -> dict[str, Any]:
    return dict(values) if names is None else {name: values[name] for name in _listed(names)}


def _merged(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        names = dict.fromkeys(name for each in values for name in each)
        return {name: _merged([each[name] for each in values if name in each]) for name in names}
    many = (list, tuple, numpy.ndarray)
    return [one for each in values for one in (each if isinstance(each, many) else [each])]
