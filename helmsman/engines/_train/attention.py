"""Attention for packed or context-parallel rows, behind the ``transformers`` attention interface.

Context parallelism is DeepSpeed-Ulysses, arXiv:2309.14509: outside attention, each rank has a part
of the tokens. For attention, an all-to-all exchange gives it all tokens of a part of the heads, and
a second one reverses that. All-to-all is the only collective that this needs, and each head is
computed as on one rank.

Packed rows are computed segment by segment: by torch's variable-length flash attention where
available (CUDA, half precision), else by one scaled_dot_product_attention per segment, which every
platform has. Either costs the sum of the squared lengths; a mask over the whole row would cost the
square of their sum.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from helmsman.api.errors import ParallelLayoutError
from helmsman.engines._models.model import decoder_layers

IMPLEMENTATION = "helmsman"
"""Name of this implementation in transformers' attention interface."""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Options of transformers' attention functions that this one lacks."""


class RowShape:
    """Layout of the rows; passed to each attention layer as a keyword argument of the model.

    ``segments`` are the lengths of the packed sequences in the single row, or None if each row is
    one sequence. ``group`` are the ranks that share the rows, or None.
    """

    def __init__(
        self,
        segments: tuple[int, ...] | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.segments = segments
        self.group = group
        if segments is not None:
            ends = list(itertools.accumulate(segments, initial=0))
            self.ends = torch.tensor(ends, dtype=torch.int32).to(device, non_blocking=True)


def use_row_attention(model: nn.Module, needed_for: str) -> None:
    """Make a transformers model use row_attention.

    Raises ValueError if the model does not support it; ``needed_for`` names the feature that needs
    it.
    """
    reason = why_not_rows(model)
    if reason:
        raise ValueError(f"{needed_for} is not supported for {type(model).__name__}: {reason}")
    AttentionInterface.register(IMPLEMENTATION, row_attention)
    model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]


def why_not_rows(model: nn.Module) -> str:
    """Return why a model's tokens can be neither packed nor split over ranks; '' if they can."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds or getattr(model, "_is_stateful", False):
        return (
            "it has layers of other kinds than attention over a sequence "
            f"({', '.join(sorted(kinds)) or 'a state'})"
        )
    if not getattr(model, "_supports_attention_backend", False):
        return "transformers does not let its attention be replaced (_supports_attention_backend)"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention scores are capped, which torch's fused kernels do not support"
    return ""


def compile_layers(model: nn.Module) -> None:
    """Compile the forward pass of each decoder layer, for any number of tokens.

    row_attention is left out, which breaks a layer's graph at its attention: the lengths of packed
    sequences are Python numbers, for which each micro-batch would be compiled again.
    """
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(row_attention))
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check_heads(config: Any, tensor_size: int, context_size: int) -> None:
    """Raise ParallelLayoutError unless the heads divide evenly over the context-parallel ranks."""
    num_heads = config.num_attention_heads
    if num_heads % (tensor_size * context_size):
        per_rank = num_heads // tensor_size
        valid = [size for size in range(1, context_size) if per_rank % size == 0]
        raise ParallelLayoutError(
            what="context_parallel_size",
            requested=context_size,
            observed=f"it does not divide the {per_rank} heads of each tensor-parallel rank "
            f"(num_attention_heads is {num_heads})",
            step=f"Set context_parallel_size to {' or '.join(map(str, valid))}",
        )


def row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    helmsman_rows: RowShape | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention: (B, H, N, D) in, (B, N, H, D) out, in the dtype of the inputs.

    This is the signature of transformers' attention interface. Raises ValueError if the model
    passes an unsupported option, or did not pass ``helmsman_rows``.
    """
    if helmsman_rows is None:
        raise ValueError(
            f"{type(module).__name__} did not receive the layout of the rows: the model does not "
            "pass keyword arguments to its attention. Set packing to False and "
            "context_parallel_size to 1"
        )
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if unsupported or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} passes "
            f"{', '.join(unsupported) or 'a mask of its own'} to its attention, which packed and "
            "context-parallel rows do not support. Set packing to False and "
            "context_parallel_size to 1"
        )
    group = helmsman_rows.group
    if group is not None:
        size = dist.get_world_size(group)
        key, value = (_repeat_heads(each, query.shape[1], size) for each in (key, value))
        query, key, value = (_heads_for_tokens(each, group) for each in (query, key, value))
    if helmsman_rows.segments is None:
        mixed = _one_sequence(query, key, value, dropout, scaling, sliding_window)
    elif not dropout and _has_flash(query):
        mixed = _flash(query, key, value, helmsman_rows, scaling, sliding_window)
    else:
        queries, keys, values = (
            each.split(list(helmsman_rows.segments), dim=2) for each in (query, key, value)
        )
        pieces = zip(queries, keys, values, strict=True)
        mixed = torch.cat(
            [_one_sequence(q, k, v, dropout, scaling, sliding_window) for q, k, v in pieces], dim=2
        )
    if group is not None:
        mixed = _tokens_for_heads(mixed, group)
    return mixed.transpose(1, 2).contiguous(), None


def _one_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        distance = (
            torch.arange(length, device=query.device)[:, None]
            - torch.arange(length, device=query.device)[None]
        )
        mask = (distance >= 0) & (distance < window)
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1 and mask is not None:
        # With a mask, torch has no fused kernel for grouped heads.
        key, value = (each.repeat_interleave(num_groups, dim=1) for each in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _has_flash(query: torch.Tensor) -> bool:
    """Whether torch has variable-length attention for this query (2.10+, CUDA, fp16 or bf16)."""
    if (
        query.device.type != "cuda"
        or query.dtype not in (torch.bfloat16, torch.float16)
        or query.shape[-1] > 256
    ):
        return False
    return _has_varlen()


@functools.cache
def _has_varlen() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    parameters = inspect.signature(varlen_attn).parameters
    return "window_size" in parameters and "enable_gqa" in parameters


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: RowShape,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert rows.segments is not None
    longest = max(rows.segments)
    query, key, value = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    mixed = varlen_attn(
        query,
        key,
        value,
        rows.ends,
        rows.ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(mixed, torch.Tensor)
    return mixed.transpose(0, 1)[None]


# --- context parallelism --------------------------------------------------------------------------


def _repeat_heads(states: torch.Tensor, num_query_heads: int, size: int) -> torch.Tensor:
    """Repeat key or value heads so that they divide evenly over the ranks.

    Whole groups stay with their query heads.
    """
    num_heads = states.shape[1]
    groups = num_query_heads // num_heads
    enough = size // math.gcd(size, num_heads)
    return (
        states.repeat_interleave(enough if groups % enough == 0 else groups, dim=1)
        if enough > 1
        else states
    )


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send part p of (P, ...) to rank p of a group; receive one part from each. Differentiable."""
    exchanged: torch.Tensor = all_to_all_single(torch.empty_like(parts), parts, group=group)
    return exchanged


def _heads_for_tokens(states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange a part of the tokens of all heads for all tokens of a part of the heads.

    From (B, H, N / P, D) to (B, H / P, N, D).
    """
    parts = torch.stack(states.chunk(dist.get_world_size(group), dim=1))
    return torch.cat(list(_exchange(parts, group).unbind()), dim=2)


def _tokens_for_heads(states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = torch.stack(states.chunk(dist.get_world_size(group), dim=2))
    return torch.cat(list(_exchange(parts, group).unbind()), dim=1)


class _Gather(torch.autograd.Function):
    """Concatenates the ranks' parts along axis 1.

    All ranks compute the same loss from the result, so each already has the whole gradient of its
    part.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return grad.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


def gather_tokens(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather (R, N, ...) from the (R, N / P, ...) of each rank. A collective.

    Differentiable if all ranks compute the same loss.
    """
    gathered: torch.Tensor = _Gather.apply(part, group)  # type: ignore[no-untyped-call]
    return gathered
