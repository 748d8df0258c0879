"""The sequences being decoded: their slots in a key-value cache, and the model's step over them.

Row r of each layer's pool holds the keys and values of one sequence, from column 0 on. Running
sequences occupy the first rows without gaps, so a step works on views and copies only the new
entries. Sequences join and leave at every step: the iteration-level scheduling of Orca (OSDI 2022).

A step covers a rounded number of rows and columns, so that few shapes occur. Rows without a
sequence compute tokens that are dropped, and write only to slots whose contents are not needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from helmsman.api.generation import SamplingParams
from helmsman.engines._hf.attention import share_heads
from helmsman.engines._hf.step_graphs import StepGraphs

_FEWEST_ROWS, _FEWEST_COLUMNS = 8, 128
"""Least rows and columns of a step; larger steps are powers of two."""


class DecodeBatch:
    """Up to ``num_slots`` sequences, in rows 0 to ``num_rows - 1``.

    A prompt's last token is not prefilled: it is the input of the sequence's first step, so that
    every token is sampled in the same way. Raises ValueError if slots cannot hold the model's kind
    of attention.
    """

    def __init__(
        self, model: nn.Module, *, num_slots: int, max_len: int, device: torch.device
    ) -> None:
        self.num_rows, self.num_slots = 0, num_slots
        self._model = model
        self._max_len = max_len
        self._device = device
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.vocab_size = int(config.vocab_size)
        self._window = int(getattr(config, "sliding_window", None) or max_len)
        self._mask_kinds = _mask_kinds(config)
        self.cache = SlotCache(num_slots, max_len)
        """Keys and values by slot."""
        self._sampling: list[SamplingParams] = []
        self._positions: list[int] = []
        dtype = next(model.parameters()).dtype
        self._visible, self._hidden = (
            torch.tensor(value, dtype=dtype, device=device) for value in (0.0, -torch.inf)
        )
        self._columns = torch.arange(max_len, device=device)
        self._slots = torch.arange(num_slots, device=device)
        self._inputs = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._input_positions = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._uniforms = torch.zeros(num_slots, max_len, device=device)
        self._params = torch.ones(3, num_slots, device=device)  # temperature, top_k, top_p
        self._kinds: tuple[bool, bool] | None = None
        """Whether all rows are greedy, and whether one is filtered; None after a change of rows."""
        self._graphs = StepGraphs(self._decode, device)
        share_heads(model)

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_rows

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        seeds: Sequence[int],
    ) -> int:
        """Prefill prompts of 1 to ``max_len - 1`` tokens together and append them as rows.

        Equal prompts are computed once. Returns the number of prompt tokens that were computed.

        Each seed determines the samples of its sequence. The random number for the token at
        position p, counted from the start of the prompt, is the p-th of the seed's stream. A
        sequence that is resumed with the same seed, here or on another instance, therefore
        continues as if uninterrupted.
        """
        start, end = self.num_rows, self.num_rows + len(prompts)
        unique: dict[tuple[int, ...], int] = {}
        which = [unique.setdefault(tuple(prompt[:-1]), len(unique)) for prompt in prompts]
        length = max(map(len, unique))
        if length:
            padded = torch.zeros(len(unique), length, dtype=torch.int64)
            for row, prefix in enumerate(unique):
                padded[row, : len(prefix)] = torch.tensor(prefix, dtype=torch.int64)
            cursor = self.cache.cursor
            cursor.prefill = True
            cursor.start = start
            cursor.rows = self._upload(which)
            # Padding on the right needs no mask: attention is causal.
            self._model.base_model(  # type: ignore[operator]
                input_ids=self._upload(padded), past_key_values=self.cache, use_cache=True
            )
        streams = [draw_uniforms(seed, self._max_len) for seed in seeds]
        positions = [len(prompt) - 1 for prompt in prompts]
        self._uniforms[start:end] = self._upload(torch.stack(streams))
        self._inputs[start:end] = self._upload([prompt[-1] for prompt in prompts])
        self._input_positions[start:end] = self._upload(positions)
        self._positions += positions
        self._sampling += sampling
        self.num_rows, self._kinds = end, None
        return sum(map(len, unique))

    def step(self) -> Callable[[], tuple[list[int], list[float]]]:
        """Sample the next token of every row, without a wait for the device.

        A sequence may run beyond its end: a step may follow before the result of the last is read.

        Returns:
            A function that waits for the step and returns tokens and their log-probabilities, by
            row.
        """
        if self._kinds is None:
            self._kinds = self._write_params()
        num_rows = min(_power_of_two(self.num_rows, _FEWEST_ROWS), self.num_slots)
        width = min(_power_of_two(max(self._positions) + 1, _FEWEST_COLUMNS), self._max_len)
        results = self._graphs(num_rows, width, *self._kinds)
        self._positions = [position + 1 for position in self._positions]
        tokens, logprobs = [each[: self.num_rows].to("cpu", non_blocking=True) for each in results]
        on_host = self._device.type == "cpu"
        arrival = None if on_host else torch.accelerator.current_stream().record_event()

        def read() -> tuple[list[int], list[float]]:
            if arrival is not None:
                arrival.synchronize()
            return tokens.tolist(), logprobs.tolist()

        return read

    def _decode(
        self, num_rows: int, width: int, all_greedy: bool, any_filtered: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Perform a step of rows and columns on the device; all of its state is there."""
        cursor = self.cache.cursor
        slots, positions = self._slots[:num_rows], self._input_positions[:num_rows]
        cursor.prefill = False
        cursor.rows = slots
        cursor.columns = positions
        cursor.width = width
        logits = self._model(
            input_ids=self._inputs[:num_rows, None],
            position_ids=positions[:, None],
            attention_mask=self._make_mask(positions, width),
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        # Rows without a sequence, and sequences beyond their end, stay in the last column.
        positions.add_(1).clamp_(max=self._max_len - 1)
        temperature, top_k, top_p = self._params[:, :num_rows].unbind()
        rows = SamplingRows(temperature, top_k, top_p, all_greedy, any_filtered)
        tokens, logprobs = sample_tokens(logits, self._uniforms[slots, positions], rows)
        self._inputs[:num_rows] = tokens
        return tokens, logprobs

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its place."""
        last = self.num_rows - 1
        if row != last:
            self.cache.move(last, row, self._positions[last])
            for state in (self._inputs, self._input_positions, self._uniforms):
                state[row] = state[last]
            self._sampling[row], self._positions[row] = self._sampling[last], self._positions[last]
        self._sampling.pop()
        self._positions.pop()
        self.num_rows, self._kinds = last, None

    def clear(self) -> None:
        self.num_rows, self._kinds = 0, None
        self._sampling.clear()
        self._positions.clear()

    def release(self) -> None:
        """Release the cache's memory. The model's weights may move until the next step."""
        self._graphs.clear()
        self.cache.release()

    def _make_mask(
        self, positions: torch.Tensor, width: int
    ) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Make additive masks (N, 1, 1, width): a row attends to its own columns.

        In layers with a sliding window, only to those within the window.
        """
        columns, last = self._columns[:width], positions[:, None]
        masks = {}
        for kind in self._mask_kinds:
            seen = columns <= last
            if kind == "sliding_attention":
                seen &= columns > last - self._window
            masks[kind] = torch.where(seen, self._visible, self._hidden)[:, None, None]
        return masks if len(masks) > 1 else masks[self._mask_kinds[0]]

    def _write_params(self) -> tuple[bool, bool]:
        vocab_size = self.vocab_size
        rows = [(each.temperature, each.top_k or vocab_size, each.top_p) for each in self._sampling]
        self._params[:, : self.num_rows] = self._upload(rows).T
        drawn = [each for each in self._sampling if each.temperature > 0]
        return not drawn, any(each.top_p < 1 or 0 < each.top_k < vocab_size for each in drawn)

    def _upload(self, values: Any) -> torch.Tensor:
        """Copy to the device without a wait for it, which memory that is not pinned would need."""
        source = torch.as_tensor(values)
        if self._device.type == "cpu":
            return source
        return source.pin_memory().to(self._device, non_blocking=True)


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


def _mask_kinds(config: Any) -> tuple[str, ...]:
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [
            "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        ]
    kinds = tuple(sorted(set(types)))
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise ValueError(
            f"{config.model_type} has layers of {', '.join(unknown)}; expected only "
            "full_attention and sliding_attention"
        )
    return kinds


# --- the cache ------------------------------------------------------------------------------------


class Cursor:
    """Position where the next forward pass writes; shared by the layers of one cache.

    Prefill writes whole prompts, from slot ``start`` on; ``rows`` (B,) int64 is the row of the pass
    for each slot. Decoding writes one token per row: ``rows`` (N,) int64 are the slots, ``columns``
    (N,) int64 the column of each, and attention covers ``width`` columns.
    """

    prefill = True
    start = width = 0
    rows = columns = torch.empty(0, dtype=torch.int64)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """One layer's pool of keys and values, each (slots, heads, columns, head size)."""

    is_sliding = False

    def __init__(self, cursor: Cursor, num_slots: int, num_columns: int) -> None:
        super().__init__()
        self._cursor = cursor
        self._num_slots = num_slots
        self._num_columns = num_columns

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pools, with zeros: a masked NaN would still spoil the sum."""
        shape = (self._num_slots, key_states.shape[1], self._num_columns)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states (B, heads, T, head size); return the states to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cursor, keys, values = self._cursor, self.keys, self.values
        if cursor.prefill:
            slots = slice(cursor.start, cursor.start + len(cursor.rows))
            length = key_states.shape[2]
            keys[slots, :, :length] = key_states[cursor.rows]
            values[slots, :, :length] = value_states[cursor.rows]
            return key_states, value_states
        num_rows, width = len(cursor.rows), cursor.width
        keys[cursor.rows, :, cursor.columns] = key_states[:, :, 0]
        values[cursor.rows, :, cursor.columns] = value_states[:, :, 0]
        return keys[:num_rows, :, :width], values[:num_rows, :, :width]

    def release(self) -> None:
        """Release the pools' memory; nothing may be stored until allocate()."""
        for pool in (self.keys, self.values) if self.is_initialized else ():
            pool.untyped_storage().resize_(0)

    def allocate(self) -> None:
        for pool in (self.keys, self.values) if self.is_initialized else ():
            if not pool.untyped_storage().nbytes():
                pool.untyped_storage().resize_(pool.nbytes)
                pool.zero_()

    def move(self, source: int, target: int, length: int) -> None:
        if self.is_initialized:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys for the model's own masks, used only in prefill."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens before a forward pass: 0, since decoding passes explicit positions."""
        return 0

    def get_max_length(self) -> int:
        return self._num_columns


class SlotCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The slots of all layers, one sequence each; a layer is added on its first use."""

    def __init__(self, num_slots: int, num_columns: int) -> None:
        self.cursor = Cursor()
        super().__init__(
            layer_class_to_replicate=functools.partial(
                SlotLayer, self.cursor, num_slots, num_columns
            )
        )

    def release(self) -> None:
        for layer in self.layers:
            layer.release()

    def allocate(self) -> None:
        """Allocate all slots again, empty.

        Raises torch.OutOfMemoryError if there is too little memory; then none are allocated.
        """
        try:
            for layer in self.layers:
                layer.allocate()
        except BaseException:
            self.release()
            raise

    def move(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            layer.move(source, target, length)


# --- drawing tokens -------------------------------------------------------------------------------


class SamplingRows(msgspec.Struct, frozen=True):
    """Sampling parameters of N sequences as columns, on the device of the logits."""

    temperature: torch.Tensor
    """(N,) float32; 0 is greedy."""
    top_k: torch.Tensor
    """(N,) at least 1; the vocabulary's size disables it."""
    top_p: torch.Tensor
    """(N,) float32, in (0, 1]."""
    all_greedy: bool
    """Whether every temperature is 0, so that no sampling is needed."""
    any_filtered: bool
    """Whether a sequence that is not greedy uses top_k or top_p, which needs a sort."""


def draw_uniforms(seed: int, num: int) -> torch.Tensor:
    """Return the first ``num`` numbers of a seed's stream, (num,) float32 in [0, 1).

    Each is a function of seed and position only. Philox is a counter-based generator that uses all
    64 bits of the seed. torch's host generator uses 32 of them, so two requests of a long run could
    share a stream.
    """
    return torch.from_numpy(
        np.random.Generator(np.random.Philox(key=seed)).random(num, dtype=np.float32)
    )


_JUST_BELOW_ONE = 1 - 2**-24
"""Largest float32 below 1. The product with it is the next smaller float32; NPUs lack nextafter."""


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, rows: SamplingRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per sequence, by inverting the cumulative distribution.

    One uniform number decides each token, so a sample depends only on the sequence's own logits and
    number, not on the rest of the batch. The order is temperature, top-k, top-p (arXiv:1904.09751),
    as in Hugging Face and vLLM.

    Args:
        logits: (N, V) floating point.
        uniforms: (N,) float32 in [0, 1).
        rows: Sampling parameters of the N sequences.

    Returns:
        Tokens (N,) int64, and their log-probabilities (N,) float32 under the model itself:
        temperature 1, no filter.
    """
    logits = logits.float()
    tokens = logits.argmax(-1)
    if not rows.all_greedy:
        greedy = rows.temperature == 0
        # Subtract the maximum first, so that dividing by a tiny temperature does not overflow.
        scaled = (logits - logits.amax(-1, keepdim=True)) / rows.temperature.masked_fill(
            greedy, 1.0
        )[:, None]
        if rows.any_filtered:
            scaled = _filter(scaled, rows)
        cumulative = scaled.softmax(-1).cumsum(-1)
        # The total is 1 only up to rounding. A target below it always selects a token with a
        # probability above 0.
        total = cumulative[:, -1]
        target = torch.minimum(uniforms * total, total * _JUST_BELOW_ONE)
        drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        tokens = torch.where(greedy, tokens, drawn)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return tokens, logprobs


def _filter(scaled: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Set logits outside of top-k and top-p to -inf, keeping the order of the vocabulary."""
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    beyond_k = torch.arange(scaled.shape[-1], device=scaled.device) >= rows.top_k[:, None]
    probabilities = ordered.masked_fill(beyond_k, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # The most likely token always stays, since no probability precedes it.
    dropped = beyond_k | (before >= rows.top_p[:, None])
    return scaled.masked_fill(torch.zeros_like(dropped).scatter_(-1, index, dropped), -torch.inf)
