"""The sequences that are being decoded: their slots, positions and sampling parameters, and the model's step over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from helmsman.api.generation import SamplingParams
from helmsman.engines._hf.sampling import SamplingRows, draw_uniforms, sample_tokens
from helmsman.engines._hf.slot_cache import SlotCache


class DecodeBatch:
    """Up to ``num_slots`` sequences, in rows 0 to ``num_rows - 1``.

    A prompt's last token is not prefilled: it is the input of the sequence's first step, so that every token is drawn in
    the same way.

    Raises: ValueError where the model's attention is of a kind that slots cannot hold.
    """

    def __init__(self, model: nn.Module, *, num_slots: int, max_len: int, device: torch.device) -> None:
        self.num_rows, self.num_slots = 0, num_slots
        self._model = model
        self._max_len = max_len
        self._device = device
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.vocab_size = int(config.vocab_size)
        self._window = int(getattr(config, "sliding_window", None) or max_len)
        self._mask_kinds = _mask_kinds(config)
        self.cache = SlotCache(num_slots, max_len)
        """Keys and values of all slots."""
        self._sampling: list[SamplingParams] = []
        self._positions: list[int] = []
        dtype = next(model.parameters()).dtype
        self._visible, self._hidden = (torch.tensor(value, dtype=dtype, device=device) for value in (0.0, -torch.inf))
        self._columns = torch.arange(max_len, device=device)
        self._slots = torch.arange(num_slots, device=device)
        self._inputs = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._input_positions = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._uniforms = torch.zeros(num_slots, max_len, device=device)
        self._rows: SamplingRows | None = None

    @property
    def num_free(self) -> int:
        """Sequences that can still be added."""
        return self.num_slots - self.num_rows

    def add(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], seeds: Sequence[int]) -> int:
        """Prefill prompts together and append them as rows. Equal prompts are computed once.

        Args:
            prompts: Token ids, 1 to ``max_len - 1`` of each.
            sampling: Parameters of each.
            seeds: Each decides what its sequence draws. The number for the token at position p, counted from the prompt's
                first, is the p-th of the seed's stream, so that a continuation resumed with the same seed goes on as if it had
                not been cut, here or on another instance.

        Returns:
            Prompt tokens that were computed.
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
            cursor.prefill, cursor.start, cursor.rows = True, start, torch.tensor(which, device=self._device)
            # Padding on the right needs no mask: no token of a prompt sees what comes after it.
            self._model.base_model(  # type: ignore[operator]
                input_ids=padded.to(self._device), past_key_values=self.cache, use_cache=True
            )
        streams = [draw_uniforms(seed, self._max_len) for seed in seeds]
        positions = [len(prompt) - 1 for prompt in prompts]
        self._uniforms[start:end] = torch.stack(streams).to(self._device)
        self._inputs[start:end] = torch.tensor([prompt[-1] for prompt in prompts], device=self._device)
        self._input_positions[start:end] = torch.tensor(positions, device=self._device)
        self._positions += positions
        self._sampling += sampling
        self.num_rows, self._rows = end, None
        return sum(map(len, unique))

    def step(self) -> tuple[list[int], list[float]]:
        """Draw the next token of every row.

        Returns:
            Tokens and their log-probabilities, by row.
        """
        num_rows, cursor = self.num_rows, self.cache.cursor
        slots, positions = self._slots[:num_rows], self._input_positions[:num_rows]
        cursor.prefill, cursor.rows, cursor.columns, cursor.width = False, slots, positions, max(self._positions) + 1
        logits = self._model(
            input_ids=self._inputs[:num_rows, None],
            position_ids=positions[:, None],
            attention_mask=self._make_mask(positions, cursor.width),
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        positions += 1
        if self._rows is None:
            self._rows = self._make_rows()
        tokens, logprobs = sample_tokens(logits, self._uniforms[slots, positions], self._rows)
        self._inputs[:num_rows] = tokens
        self._positions = [position + 1 for position in self._positions]
        return tokens.tolist(), logprobs.tolist()

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
        self.num_rows, self._rows = last, None

    def clear(self) -> None:
        """Drop all rows."""
        self.num_rows, self._rows = 0, None
        self._sampling.clear()
        self._positions.clear()

    def _make_mask(self, positions: torch.Tensor, width: int) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Additive masks (N, 1, 1, width): a row sees its own columns, within the window in layers that have one."""
        columns, last = self._columns[:width], positions[:, None]
        masks = {}
        for kind in self._mask_kinds:
            seen = columns <= last
            if kind == "sliding_attention":
                seen &= columns > last - self._window
            masks[kind] = torch.where(seen, self._visible, self._hidden)[:, None, None]
        return masks if len(masks) > 1 else masks[self._mask_kinds[0]]

    def _make_rows(self) -> SamplingRows:
        def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        drawn = [params for params in self._sampling if params.temperature > 0]
        return SamplingRows(
            temperature=column([params.temperature for params in self._sampling], torch.float32),
            top_k=column([params.top_k or self.vocab_size for params in self._sampling], torch.int64),
            top_p=column([params.top_p for params in self._sampling], torch.float32),
            all_greedy=not drawn,
            any_filtered=any(params.top_p < 1 or 0 < params.top_k < self.vocab_size for params in drawn),
        )


def _mask_kinds(config: Any) -> tuple[str, ...]:
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    kinds = tuple(sorted(set(types)))
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise ValueError(
            f"{config.model_type} has layers of {', '.join(unknown)}; the rollout engine decodes full and sliding attention"
        )
    return kinds
