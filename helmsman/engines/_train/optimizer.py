"""The optimizer step: AdamW (arXiv:1711.05101) by torch's fused kernel, and bfloat16 moments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from helmsman.engines._models.model import resolve_dtype
from helmsman.engines._train.offload import HostMemory
from helmsman.engines._train.parallel import clip_gradients
from helmsman.engines.train_config import TrainConfig

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


def make_optimizer(model: nn.Module, config: TrainConfig) -> FusedAdamW:
    return FusedAdamW(
        [each for each in model.parameters() if each.requires_grad],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        moments_dtype=resolve_dtype(config.moments_dtype),
    )


def take_step(
    model: nn.Module,
    optimizer: FusedAdamW,
    config: TrainConfig,
    memory: HostMemory,
    num_steps: int,
) -> tuple[float, float]:
    """Clip the gradients, take the step after ``num_steps`` others, and free the gradients.

    Returns the norm of the gradient before clipping, and the learning rate. Raises
    FloatingPointError if the gradient is not finite; weights and optimizer are unchanged. A
    collective.
    """
    grad_norm = clip_gradients(model.parameters(), config.max_grad_norm)
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"the gradient's norm is {grad_norm} at step {num_steps}; no step was taken"
        )
    lr = config.lr * min(1.0, (num_steps + 1) / max(1, config.num_warmup_steps))
    for group in optimizer.param_groups:
        group["lr"] = lr
    with memory.optimizer_present(optimizer):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm, lr


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
