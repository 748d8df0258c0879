"""Token rows: how the samples of a micro-batch lie in what the model gets, and the way back.

A causal model needs no attention mask for padding on the right: no real token sees it. Packed, the samples lie end to end in
one row; positions begin again at each, and attention is told where they end (helmsman/engines/_train/attention.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import torch


class TokenRows(msgspec.Struct, frozen=True):
    """R rows of N tokens, on the host, and where in them each sample's tokens are."""

    input_ids: torch.Tensor
    """(R, N) int64."""
    position_ids: torch.Tensor
    """(R, N) int64: the position of each token in its sample."""
    next_ids: torch.Tensor
    """(R, N) int64: the token after each in its row; of no meaning where a sample ends."""
    places: torch.Tensor
    """(B, T) int64: where in the flattened rows each token of each sample is; 0 beyond its end."""
    lengths: torch.Tensor
    """(B,) int64: tokens of each sample."""
    segments: tuple[int, ...] | None
    """Packed: lengths that add up to N, of which none sees another. None: each row is one sequence."""

    def per_token(self, values: torch.Tensor) -> torch.Tensor:
        """(B, T): what the model says *at* each token of each sample, from (R, N); 0 beyond its end. Differentiable."""
        within = torch.arange(self.places.shape[1])[None] < self.lengths[:, None]
        return self._at(values, self.places, within)

    def per_prediction(self, values: torch.Tensor) -> torch.Tensor:
        """(B, T): what the model says at the token *before* each, from (R, N); 0 at the first and beyond the end."""
        positions = torch.arange(self.places.shape[1])[None]
        return self._at(values, (self.places - 1).clamp(min=0), (positions > 0) & (positions < self.lengths[:, None]))

    @staticmethod
    def _at(values: torch.Tensor, places: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
        places, within = (each.to(values.device, non_blocking=True) for each in (places, within))
        return values.flatten().take(places).masked_fill(~within, 0.0)


def pad(samples: Sequence[torch.Tensor], multiple: int = 1) -> TokenRows:
    """One row per sample, padded on the right to one length, which is a multiple of ``multiple``."""
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
    """One row of all samples, end to end; what pads it to a multiple of ``multiple`` is a segment of its own."""
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
