"""From samples to padded micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from helmsman.api.engines import Sample
from helmsman.api.pairs import sample_units


class MicroBatch(msgspec.Struct, frozen=True):
    """Some samples of a batch, padded on the right to one length."""

    indices: tuple[int, ...]
    """Which samples these are, one per row."""
    lengths: tuple[int, ...]
    """Their lengths before padding."""
    columns: dict[str, torch.Tensor]
    """``input_ids`` (B, T) int64, ``loss_mask`` (B, T) bool, and the samples' other entries: (B, T) or (B,), on the host."""
    num_loss_tokens: int
    """True entries of ``loss_mask``."""

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The columns on a device."""
        return {name: column.to(device, non_blocking=True) for name, column in self.columns.items()}


def make_micro_batches(samples: Sequence[Sample], *, max_tokens: int, vocab_size: int) -> list[MicroBatch]:
    """Sort samples by length and cut them into micro-batches of at most ``max_tokens`` entries, padding included.

    The two samples of a pair (helmsman.api.pairs) are rows 2j and 2j + 1 of one micro-batch, in the order of the batch.

    A causal model needs no attention mask for padding on the right: no real token sees it, and ``loss_mask`` leaves it out.

    Args:
        samples: As ``helmsman.api.engines.Sample``, all with the same entries. Without ``loss_mask`` every token
            but the first counts.
        max_tokens: Budget of rows times padded length; a longer sample, or pair, gets a micro-batch of its own.
        vocab_size: Token ids are below this.

    Raises:
        ValueError: A sample lacks ``input_ids``, has ids outside the vocabulary, other entries than the first sample, or an
            entry of another length; or ``pair`` is not that of two samples.
    """
    rows = [_to_columns(index, sample, vocab_size) for index, sample in enumerate(samples)]
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(f"sample {index} has the entries {sorted(row)}, but sample 0 has {sorted(rows[0])}")
    units = [(max(len(rows[index]["input_ids"]) for index in unit), unit) for unit in sample_units(rows)]
    groups: list[list[int]] = []
    padded_length = 0
    for length, unit in sorted(units, key=lambda item: -item[0]):
        if groups and (len(groups[-1]) + len(unit)) * padded_length <= max_tokens:
            groups[-1].extend(unit)
        else:
            groups.append(list(unit))
            padded_length = length
    return [_pad(group, [rows[index] for index in group]) for group in groups]


def empty_micro_batch() -> MicroBatch:
    """A stand-in for a rank that has fewer micro-batches than the others and must still take part in their collectives."""
    columns = {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "loss_mask": torch.zeros(1, 2, dtype=torch.bool)}
    return MicroBatch(indices=(), lengths=(), columns=columns, num_loss_tokens=0)


def _to_columns(index: int, sample: Mapping[str, Any], vocab_size: int) -> dict[str, torch.Tensor]:
    if "input_ids" not in sample:
        raise ValueError(f"sample {index} has no 'input_ids'; it has: {', '.join(sorted(sample)) or 'nothing'}")
    columns = {name: _to_tensor(index, name, value) for name, value in sample.items()}
    input_ids = columns["input_ids"]
    if input_ids.ndim != 1 or not len(input_ids) or input_ids.dtype.is_floating_point:
        raise ValueError(f"sample {index}: 'input_ids' is {tuple(input_ids.shape)} {input_ids.dtype}; expected (T,) int, T > 0")
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= vocab_size:
        raise ValueError(f"sample {index}: 'input_ids' has ids outside the vocabulary, which has {vocab_size}")
    for name, column in columns.items():
        if column.ndim > 1 or (column.ndim == 1 and len(column) != len(input_ids)):
            raise ValueError(
                f"sample {index}: {name!r} has the shape {tuple(column.shape)}; expected ({len(input_ids)},), one entry per "
                "token, or a scalar"
            )
    mask = columns.get("loss_mask", torch.ones(len(input_ids), dtype=torch.bool))
    if mask.ndim != 1:
        raise ValueError(f"sample {index}: 'loss_mask' is a scalar; expected one entry per token")
    mask = mask.bool().clone()
    mask[0] = False
    return {**columns, "input_ids": input_ids.long(), "loss_mask": mask}


def _to_tensor(index: int, name: str, value: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as exc:
        raise ValueError(f"sample {index}: {name!r} (a {type(value).__name__}) is not numeric: {exc}") from exc
    return tensor.float() if tensor.dtype.is_floating_point else tensor


def _pad(indices: Sequence[int], rows: Sequence[Mapping[str, torch.Tensor]]) -> MicroBatch:
    columns = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)
        if first.ndim
        else torch.stack([row[name] for row in rows])
        for name, first in rows[0].items()
    }
    return MicroBatch(
        indices=tuple(indices),
        lengths=tuple(len(row["input_ids"]) for row in rows),
        columns=columns,
        num_loss_tokens=int(columns["loss_mask"].sum()),
    )
