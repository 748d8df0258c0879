"""Checks samples and groups them into micro-batches under a token budget.

A causal model needs no attention mask for padding on the right: no real token attends to it. Packed
samples are concatenated in one row; positions restart at each sample, and attention gets the
segment lengths (attention.py).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from helmsman.api.engines import (
    PER_CHOICE,
    TOP_IDS,
    Sample,
    SampleShare,
    require_mapping,
    sample_numbers,
)
from helmsman.api.pairs import sample_units

_ALIGNMENT = 16

Columns = Mapping[str, torch.Tensor]
"""Entries of one sample, on the host."""


class TokenRows(msgspec.Struct, frozen=True):
    """R rows of N tokens, and the position of each sample's tokens in them; on one device."""

    input_ids: torch.Tensor
    """(R, N) int64."""
    position_ids: torch.Tensor
    """(R, N) int64: position of each token in its sample."""
    next_ids: torch.Tensor
    """(R, N) int64: the next token in the row; meaningless at the end of a sample."""
    places: torch.Tensor
    """(B, T) int64: index of each sample's tokens in the flattened rows; 0 beyond its end."""
    lengths: torch.Tensor
    """(B,) int64: number of tokens of each sample."""
    segments: tuple[int, ...] | None
    """Packed: lengths of the independent segments, which add up to N. None: each row is one
    sequence.
    """

    def per_token(self, values: torch.Tensor) -> torch.Tensor:
        """Select outputs (R, N, ...) *at* each token: (B, T, ...), 0 beyond the end.

        Differentiable.
        """
        return self._at(values, self.places, self._positions() < self.lengths[:, None])

    def per_prediction(self, values: torch.Tensor) -> torch.Tensor:
        """Select outputs (R, N, ...) *before* each token: (B, T, ...).

        They are 0 at the first token and past the end. Differentiable.
        """
        return self._at(values, (self.places - 1).clamp(min=0), self._is_predicted())

    def to_predictions(self, column: torch.Tensor) -> torch.Tensor:
        """Put a column (B, T, ...) *before* each token: (R, N, ...), and 0 elsewhere."""
        rows = column.new_zeros((self.input_ids.numel(), *column.shape[2:]))
        within = self._is_predicted()
        rows[(self.places - 1)[within]] = column[within]
        return rows.view(*self.input_ids.shape, *column.shape[2:])

    def _is_predicted(self) -> torch.Tensor:
        positions = self._positions()
        return (positions > 0) & (positions < self.lengths[:, None])

    def _positions(self) -> torch.Tensor:
        return torch.arange(self.places.shape[1], device=self.places.device)[None]

    @staticmethod
    def _at(values: torch.Tensor, places: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
        within = within.view(*within.shape, *[1] * (values.ndim - 2))
        return values.flatten(0, 1)[places].masked_fill(~within, 0)


def pad(samples: Sequence[torch.Tensor], multiple: int = 1) -> TokenRows:
    """Put each sample in a row, padded on the right to one length, a multiple of ``multiple``."""
    input_ids = torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
    num_rows, longest = input_ids.shape
    input_ids = torch.nn.functional.pad(input_ids, (0, -longest % multiple))
    length = input_ids.shape[1]
    return TokenRows(
        input_ids=input_ids,
        position_ids=torch.arange(length).repeat(num_rows, 1),
        next_ids=input_ids.roll(-1, dims=1),
        places=_places([row * length for row in range(num_rows)], longest, num_rows * length),
        lengths=torch.tensor([len(sample) for sample in samples]),
        segments=None,
    )


def pack(samples: Sequence[torch.Tensor], multiple: int = 1) -> TokenRows:
    """Concatenate all samples in one row; padding to ``multiple`` is a separate segment."""
    lengths = [len(sample) for sample in samples]
    padding = -sum(lengths) % multiple
    segments = (*lengths, padding) if padding else tuple(lengths)
    input_ids = torch.nn.functional.pad(torch.cat(list(samples)), (0, padding))[None]
    starts = list(itertools.accumulate(lengths[:-1], initial=0))
    return TokenRows(
        input_ids=input_ids,
        position_ids=torch.cat([torch.arange(length) for length in segments])[None],
        next_ids=input_ids.roll(-1, dims=1),
        places=_places(starts, max(lengths), input_ids.numel()),
        lengths=torch.tensor(lengths),
        segments=segments,
    )


def _places(starts: Sequence[int], longest: int, num_tokens: int) -> torch.Tensor:
    places = torch.tensor(starts)[:, None] + torch.arange(longest)[None]
    return places.where(places < num_tokens, 0)


class MicroBatch(msgspec.Struct, frozen=True):
    """Some samples of a batch: columns for the loss and rows for the model."""

    indices: tuple[int, ...]
    """Index of each row's sample in the batch."""
    lengths: tuple[int, ...]
    """Lengths of the samples before padding."""
    columns: dict[str, torch.Tensor]
    """``input_ids`` (B, T) int64, ``loss_mask`` (B, T) bool, and the samples' other entries, (B,),
    (B, T) or (B, T, k); padded on the right to the longest sample.
    """
    rows: TokenRows
    """The same tokens in the layout of the model's input."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device, all of it by one transfer of pinned memory."""
        rows = {name: getattr(self.rows, name) for name in _ROW_TENSORS}
        moved = iter(_moved([*self.columns.values(), *rows.values()], device))
        return msgspec.structs.replace(
            self,
            columns=dict(zip(self.columns, moved, strict=False)),
            rows=msgspec.structs.replace(self.rows, **dict(zip(rows, moved, strict=True))),
        )


_ROW_TENSORS = ("input_ids", "position_ids", "next_ids", "places", "lengths")


def _moved(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    if device.type == "cpu":
        return list(tensors)
    return in_one_piece(tensors, lambda buffer: buffer.to(device, non_blocking=True), pinned=True)


def in_one_piece(
    tensors: Sequence[torch.Tensor],
    move: Callable[[torch.Tensor], torch.Tensor],
    *,
    pinned: bool,
) -> list[torch.Tensor]:
    """Apply ``move`` to host tensors at once, in a buffer of bytes that holds all of them.

    From pageable memory, a device copies only after the work that it has in its queue, and the host
    waits for that.
    """
    ends = list(
        itertools.accumulate(-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in tensors)
    )
    starts = [0, *ends][: len(tensors)]
    buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pinned)

    def view(of: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
        return of[start : start + like.nbytes].view(like.dtype).view(like.shape)

    for start, tensor in zip(starts, tensors, strict=True):
        view(buffer, start, tensor).copy_(tensor)
    there = move(buffer)
    return [view(there, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int
    """Token budget of one micro-batch, padding included; a longer sample, or pair, gets its own
    micro-batch.
    """
    vocab_size: int
    """Token ids are below this."""
    packing: bool = False
    """Whether samples are concatenated in one row; else each is a padded row."""
    multiple: int = 1
    """Row lengths are padded to a multiple of this, the number of ranks that share the rows."""


def check_samples(samples: Sequence[Sample], vocab_size: int) -> list[Columns]:
    """Convert each sample's entries to tensors, and check that all samples have the same ones.

    Without ``loss_mask`` every token but the first is in the loss. Messages give the numbers of a
    SampleShare's samples in the whole batch.

    Raises:
        ValueError: A sample is not a mapping, lacks ``input_ids``, has ids outside the vocabulary,
            or its entries differ from the first sample's in name or in being per token; an entry
            has another length; or a ``pair`` does not have two samples.
    """
    numbers = sample_numbers(samples)
    checked: list[Columns] = [
        _to_columns(number, sample, vocab_size)
        for number, sample in zip(numbers, samples, strict=True)
    ]
    for number, columns in zip(numbers, checked, strict=True):
        if columns.keys() != checked[0].keys():
            raise ValueError(
                f"sample {number} has the entries {sorted(columns)}, but sample {numbers[0]} has "
                f"{sorted(checked[0])}"
            )
        for name, column in columns.items():
            if column.ndim != checked[0][name].ndim:
                scalar, other = (number, numbers[0]) if column.ndim == 0 else (numbers[0], number)
                raise ValueError(
                    f"{name!r} is a scalar in sample {scalar}, but has one entry per token in "
                    f"sample {other}"
                )
            if column.shape[1:] != checked[0][name].shape[1:]:
                raise ValueError(
                    f"{name!r} has {column.shape[1]} choices per token in sample {number}, but "
                    f"{checked[0][name].shape[1]} in sample {numbers[0]}"
                )
    sample_units(SampleShare(checked, numbers))
    # A padded column takes the dtype of its first row: floats beside a row of integers would be
    # truncated.
    fractions = {
        name
        for columns in checked
        for name, column in columns.items()
        if column.is_floating_point()
    }
    return [
        {name: column.float() if name in fractions else column for name, column in columns.items()}
        for columns in checked
    ]


def group_samples(
    samples: Sequence[Columns], batching: Batching, at_least: int = 0
) -> list[list[int]]:
    """Group samples, longest first, into as few groups as the budget allows; returns their indices.

    When packing, at least ``at_least`` groups are made if possible, with about the same number of
    tokens each, so that ranks with the same number of groups stay in step. The two samples of a
    pair (helmsman.api.pairs) are adjacent in one group, in the order of the batch.
    """
    units = sample_units(samples)
    lengths = [[len(samples[index]["input_ids"]) for index in unit] for unit in units]
    sizes = [sum(each) if batching.packing else len(each) * max(each) for each in lengths]
    order = sorted(range(len(units)), key=lambda number: -sizes[number])
    if batching.packing:
        groups = _first_fit(order, sizes, batching.max_tokens)
        groups = (
            _balanced(
                order, sizes, min(max(at_least, len(groups)), len(units)), batching.max_tokens
            )
            or groups
        )
    else:
        groups = _under_padded_budget(order, sizes, batching.max_tokens)
    return [[index for number in group for index in units[number]] for group in groups]


def make_micro_batch(
    indices: Sequence[int], samples: Sequence[Columns], batching: Batching
) -> MicroBatch:
    chosen = [samples[index] for index in indices]
    columns = {
        name: torch.nn.utils.rnn.pad_sequence([sample[name] for sample in chosen], batch_first=True)
        if first.ndim
        else torch.stack([sample[name] for sample in chosen])
        for name, first in chosen[0].items()
    }
    return MicroBatch(
        indices=tuple(indices),
        lengths=tuple(len(sample["input_ids"]) for sample in chosen),
        columns=columns,
        rows=(pack if batching.packing else pad)(
            [sample["input_ids"] for sample in chosen], batching.multiple
        ),
    )


def empty_micro_batch(batching: Batching) -> MicroBatch:
    """Make a micro-batch without samples.

    A rank with fewer micro-batches than the others uses it to take part in their collectives.
    """
    tokens = torch.zeros(2, dtype=torch.int64)
    stand_in = {"input_ids": tokens, "loss_mask": torch.zeros(2, dtype=torch.bool)}
    made = make_micro_batch([0], [stand_in], batching)
    return msgspec.structs.replace(made, indices=(), lengths=())


def fingerprint(samples: Sequence[Columns]) -> int:
    """Return a checksum by which ranks detect that their samples differ."""
    found = 0
    for sample in samples:
        found = zlib.crc32(sample["input_ids"].contiguous().numpy().tobytes(), found)
        found = zlib.crc32(sample["loss_mask"].numpy().tobytes(), found)
    return found


def _under_padded_budget(
    order: Sequence[int], lengths: Sequence[int], max_tokens: int
) -> list[list[int]]:
    groups: list[list[int]] = []
    for index in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First fit, longest first: at most 11/9 of the optimum plus one (Johnson 1973, Yue 1991)."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index in order:
        place = next((place for place, free in enumerate(room) if lengths[index] <= free), None)
        if place is None:
            groups.append([])
            room.append(max_tokens)
            place = len(groups) - 1
        groups[place].append(index)
        room[place] -= lengths[index]
    return groups


def _balanced(
    order: Sequence[int], lengths: Sequence[int], num: int, max_tokens: int
) -> list[list[int]] | None:
    """Make ``num`` groups of about equally many tokens; None if that would exceed the budget."""
    groups: list[list[int]] = [[] for _ in range(num)]
    tokens = [0] * num
    for index in order:
        place = min(range(num), key=lambda place: (tokens[place], len(groups[place])))
        groups[place].append(index)
        tokens[place] += lengths[index]
    too_long = any(
        total > max_tokens and len(group) > 1 for total, group in zip(tokens, groups, strict=True)
    )
    return None if too_long else groups


def _to_columns(number: int, sample: Mapping[str, Any], vocab_size: int) -> dict[str, torch.Tensor]:
    require_mapping(number, sample)
    if "input_ids" not in sample:
        raise ValueError(
            f"sample {number} has no 'input_ids'; it has: {', '.join(sorted(sample)) or 'nothing'}"
        )
    columns = {name: _to_tensor(number, name, value) for name, value in sample.items()}
    input_ids = columns["input_ids"]
    if input_ids.ndim != 1 or not len(input_ids) or input_ids.dtype.is_floating_point:
        raise ValueError(
            f"sample {number}: 'input_ids' is {tuple(input_ids.shape)} {input_ids.dtype}; "
            "expected (T,) int, T > 0"
        )
    input_ids = input_ids.long()
    for name, column in columns.items():
        is_fit, expected = column.ndim < 2, f"({len(input_ids)},), one entry per token, or a scalar"
        if name in PER_CHOICE:
            is_fit, expected = column.ndim == 2, f"({len(input_ids)}, k), k choices per token"
        if not is_fit or (column.ndim and len(column) != len(input_ids)):
            raise ValueError(
                f"sample {number}: {name!r} has the shape {tuple(column.shape)}; expected "
                f"{expected}"
            )
    for name in ("input_ids", TOP_IDS):
        ids = columns.get(name, input_ids).long()  # torch has no min() for unsigned types
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise ValueError(
                f"sample {number}: {name!r} has ids outside the vocabulary of size {vocab_size}"
            )
    mask = columns.get("loss_mask", torch.ones(len(input_ids), dtype=torch.bool))
    if mask.ndim != 1:
        raise ValueError(f"sample {number}: 'loss_mask' is a scalar; expected one entry per token")
    mask = mask.bool().clone()
    mask[0] = False
    return {**columns, "input_ids": input_ids, "loss_mask": mask}


def _to_tensor(number: int, name: str, value: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as exc:
        raise ValueError(
            f"sample {number}: {name!r} (a {type(value).__name__}) is not numeric: {exc}"
        ) from exc
    return tensor.float() if tensor.dtype.is_floating_point else tensor
