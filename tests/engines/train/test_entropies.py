"""Entropies and their gradients against torch's own distributions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines._train.vocabulary import distribution_entropies, target_logprobs
from tests.engines.ranks import run_ranks


@pytest.mark.parametrize("chunk_numel", [1, 22, 1 << 24])
def test_distribution_entropies_equal_torch(chunk_numel: int) -> None:
    logits = (
        torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0)) * 3
    ).requires_grad_()
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    found = distribution_entropies(logits, chunk_numel=chunk_numel)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (grad,) = torch.autograd.grad((found * weights).sum(), logits)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


def test_distribution_entropies_impossible_tokens() -> None:
    logits = torch.tensor([[[1.0, -torch.inf, 1.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    entropies = distribution_entropies(logits)
    entropies.sum().backward()
    assert entropies[0].tolist() == pytest.approx([math.log(2), math.log(3)])
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_distribution_entropies_half_precision() -> None:
    logits = (
        torch.randn(2, 4, 1000, generator=torch.Generator().manual_seed(0))
        .bfloat16()
        .requires_grad_()
    )
    entropies = distribution_entropies(logits)
    entropies.sum().backward()
    assert entropies.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        entropies.detach(), distribution_entropies(logits.detach().float()), atol=1e-6, rtol=1e-6
    )


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(4)
    return torch.randn(3, 5, 8, generator=random) * 3, torch.randn(3, 5, generator=random)


def of_a_part() -> tuple[torch.Tensor, torch.Tensor]:
    join_process_group(rendezvous_timeout_s=60, collective_timeout_s=60)
    logits, weights = drawn()
    part = logits.chunk(2, dim=-1)[dist.get_rank()].clone().requires_grad_()
    entropies = distribution_entropies(part, dist.group.WORLD, chunk_numel=20)
    (grad,) = torch.autograd.grad((entropies * weights).sum(), part)
    leave_process_group()
    return entropies.detach(), grad


@pytest.mark.slow
def test_distribution_entropies_vocabulary_parallel() -> None:
    logits, weights = drawn()
    logits.requires_grad_()
    expected = distribution_entropies(logits)
    (grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    parts = run_ranks(of_a_part, 2)
    for entropies, _ in parts:
        torch.testing.assert_close(entropies, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.cat([part for _, part in parts], dim=-1), grad, atol=1e-5, rtol=1e-5
    )


def test_loss_operators_without_npu_kernels() -> None:
    """special.entr has no kernel in torch_npu."""
    used: set[str] = set()

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            used.add(func.name())
            return func(*args, **(kwargs or {}))

    logits = torch.randn(2, 3, 11, requires_grad=True)
    with Recorded():
        entropies = distribution_entropies(logits)
        picked = target_logprobs(logits, torch.zeros(2, 3, dtype=torch.int64))
        (entropies.sum() + picked.sum()).backward()
    assert "aten::logsumexp" in used
    assert "aten::special_entr" not in used
