"""Attention of decoding steps without copies of keys and values, for older transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import sdpa_attention
from transformers.masking_utils import sdpa_mask


def share_heads(model: Any) -> None:
    """Make a model with grouped-query attention decode without repeating keys for each query head.

    Releases of transformers that have ``pack_gqa`` do so themselves; their models stay unchanged.
    """
    if model.config._attn_implementation == "sdpa" and not hasattr(sdpa_attention, "pack_gqa"):
        AttentionInterface.register("helmsman_decode", attend)
        AttentionMaskInterface.register("helmsman_decode", sdpa_mask)
        model.set_attn_implementation("helmsman_decode")


def attend(module: nn.Module, *states: Any, **options: Any) -> tuple[torch.Tensor, Any]:
    """Attend like transformers' ``sdpa``; heads that share keys become the rows of one query.

    Args:
        module: The attention layer.
        *states: Queries (N, heads, T, head size), keys (N, key heads, columns, head size), values
            (N, key heads, columns, value size), and the mask (N, 1, T, columns) that is added to
            the scores, or None for causal attention.
        **options: Those of ``sdpa``.

    Returns:
        (N, T, heads, value size), and None in place of the scores.
    """
    query, key, value, mask = states
    (num_rows, num_heads, length, size), scale = query.shape, options.get("scaling")
    if length > 1 or mask is None or options.get("position_bias") is not None:
        attended, _ = sdpa_attention.sdpa_attention_forward(module, *states, **options)
        return attended, None
    query = query.reshape(num_rows, key.shape[1], -1, size)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return attended.reshape(num_rows, 1, num_heads, -1), None
