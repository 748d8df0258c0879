"""Drawing the next token of many sequences at once, each with its own parameters."""

from __future__ import annotations

import msgspec
import numpy as np
import torch


class SamplingRows(msgspec.Struct, frozen=True):
    """Sampling parameters of N sequences as columns, on the device of the logits."""

    temperature: torch.Tensor
    """(N,) float32; 0 is greedy."""
    top_k: torch.Tensor
    """(N,) int64, at least 1; the vocabulary's size keeps all."""
    top_p: torch.Tensor
    """(N,) float32, in (0, 1]."""
    all_greedy: bool
    """Whether every temperature is 0, which spares the drawing."""
    any_filtered: bool
    """Whether a sequence that is not greedy uses top_k or top_p, which takes a sort."""


def draw_uniforms(seed: int, num: int) -> torch.Tensor:
    """The first numbers of a seed's stream: a function of seed and position alone, whatever ``num`` is.

    Philox counts, so all 64 bits of the seed matter; torch's generator on the host uses 32 of them, under which two requests of
    a long run may well draw the same.

    Args:
        seed: 0 to 2**64 - 1.

    Returns:
        (num,) float32 in [0, 1), on the host.
    """
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=seed)).random(num, dtype=np.float32))


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per sequence by inverting the cumulative distribution.

    One uniform number decides each token, so what a sequence draws depends on its own logits and number alone, not on its
    neighbours in the batch. The order is temperature, top-k, top-p (arXiv:1904.09751), as in Hugging Face and vLLM.

    Args:
        logits: (N, V) of any floating-point type.
        uniforms: (N,) float32 in [0, 1).
        rows: The sequences' parameters.

    Returns:
        Tokens (N,) int64, and their log-probabilities (N,) float32 under the plain model: temperature 1, nothing left out.
    """
    logits = logits.float()
    tokens = logits.argmax(-1)
    if not rows.all_greedy:
        greedy = rows.temperature == 0
        # A subtraction first: dividing by a tiny temperature must not overflow.
        scaled = (logits - logits.amax(-1, keepdim=True)) / rows.temperature.masked_fill(greedy, 1.0)[:, None]
        if rows.any_filtered:
            scaled = _filter(scaled, rows)
        cumulative = scaled.softmax(-1).cumsum(-1)
        # The total is 1 only up to rounding; staying below it keeps the draw on a token that has a probability.
        total = cumulative[:, -1]
        target = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
        drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        tokens = torch.where(greedy, tokens, drawn)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return tokens, logprobs


def _filter(scaled: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Logits with everything outside top-k and top-p at -inf, in the order of the vocabulary."""
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    beyond_k = torch.arange(scaled.shape[-1], device=scaled.device) >= rows.top_k[:, None]
    probabilities = ordered.masked_fill(beyond_k, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # The most likely token stays in any case: nothing comes before it.
    dropped = beyond_k | (before >= rows.top_p[:, None])
    return scaled.masked_fill(torch.zeros_like(dropped).scatter_(-1, index, dropped), -torch.inf)
