"""AdamW (arXiv:1711.05101) by torch's fused kernel, with moments that may be kept in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK_BYTES = 256 << 20
"""Bytes of moments that are in float32 at once, or those of one parameter."""


class FusedAdamW(torch.optim.AdamW):
    """AdamW whose moments are kept in ``moments_dtype`` between steps, and computed in float32."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, moments_dtype: torch.dtype, **options: Any
    ) -> None:
        # Without the fused kernel, torch steps one DTensor parameter at a time.
        super().__init__(parameters, fused=True, **options)
        self._moments_dtype = moments_dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step. Parameters without a gradient are skipped."""
        if self._moments_dtype == torch.float32:
            super().step()
            return
        # torch's kernel takes moments of the parameters' type only.
        for group in self.param_groups:
            every = group["params"]
            try:
                for chunk in _chunks(each for each in every if each.grad is not None):
                    group["params"] = chunk
                    self._cast(chunk, torch.float32)
                    super().step()
                    self._cast(chunk, self._moments_dtype)
            finally:
                group["params"] = every

    def cast_moments(self) -> None:
        """Convert moments that were read from a checkpoint of another type."""
        self._cast(self.state, self._moments_dtype)

    def _cast(self, parameters: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            state.update({key: state[key].to(dtype) for key in _MOMENTS if key in state})


def _chunks(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    num_bytes = 0
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        num_bytes += 8 * local.numel()
        chunk.append(parameter)
        if num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
