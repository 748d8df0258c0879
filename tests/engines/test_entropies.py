"""Entropies and their gradients against torch's own distributions."""

from __future__ import annotations

import pytest
import torch

from helmsman.engines.entropies import token_entropies


@pytest.mark.parametrize("chunk_numel", [1, 22, 1 << 24])
def test_entropies_are_those_of_the_distribution_before_each_token(chunk_numel: int) -> None:
    logits = (torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    found = token_entropies(logits, chunk_numel)
    assert (found[:, 0] == 0).all()
    expected = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    torch.testing.assert_close(found[:, 1:], expected, atol=1e-5, rtol=1e-5)
    (grad,) = torch.autograd.grad((found * weights).sum(), logits)
    (expected_grad,) = torch.autograd.grad((expected * weights[:, 1:]).sum(), logits)
    torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


def test_tokens_that_cannot_come_count_for_nothing() -> None:
    logits = torch.tensor([[[1.0, -torch.inf, 1.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    entropies = token_entropies(logits)
    entropies.sum().backward()
    assert entropies[0, 1].item() == pytest.approx(torch.tensor(2.0).log().item())
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_half_precision_is_computed_in_single() -> None:
    logits = torch.randn(2, 4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    entropies = token_entropies(logits)
    entropies.sum().backward()
    assert entropies.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(entropies.detach(), token_entropies(logits.detach().float()), atol=1e-6, rtol=1e-6)
