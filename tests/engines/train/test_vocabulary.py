"""Test log-probabilities, entropies and their gradients against torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines._train import vocabulary
from helmsman.engines._train.vocabulary import OutputLayer, token_statistics, top_choices
from tests.engines.ranks import run_ranks


def target_logprobs(logits: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
    return token_statistics(logits, targets, **how).logprobs


def distribution_entropies(logits: torch.Tensor, **how: Any) -> torch.Tensor:
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    entropies = token_statistics(logits, targets, with_entropies=True, **how).entropies
    assert entropies is not None
    return entropies


@pytest.mark.parametrize("chunk_numel", [1, 60, 1 << 24])
def test_target_logprobs_equal_log_softmax(chunk_numel: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 20, generator=generator, requires_grad=True)
    input_ids = torch.randint(0, 20, (3, 7), generator=generator)
    grad = torch.randn(3, 7, generator=generator)
    actual = target_logprobs(logits, input_ids, chunk_numel=chunk_numel)
    (actual_grad,) = torch.autograd.grad(actual, logits, grad)
    expected = logits.log_softmax(-1).gather(-1, input_ids[..., None])[..., 0]
    (expected_grad,) = torch.autograd.grad(expected, logits, grad)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_grad, expected_grad)


def test_target_logprobs_half_precision() -> None:
    logits = torch.randn(2, 5, 20, dtype=torch.bfloat16, requires_grad=True)
    logprobs = target_logprobs(logits, torch.zeros(2, 5, dtype=torch.int64))
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


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


def on_each_rank() -> tuple[Any, ...]:
    join_process_group(rendezvous_timeout_s=60, collective_timeout_s=60)
    try:
        return of_a_part(), of_a_part_of_the_layer(), choices_of_a_part()
    finally:
        leave_process_group()


@pytest.fixture(scope="module")
def parts() -> list[tuple[Any, ...]]:
    """Results of two vocabulary-parallel ranks, from logits and from an output layer."""
    return run_ranks(on_each_rank, 2)


def of_a_part() -> tuple[torch.Tensor, torch.Tensor]:
    logits, weights = drawn()
    part = logits.chunk(2, dim=-1)[dist.get_rank()].clone().requires_grad_()
    entropies = distribution_entropies(part, group=dist.group.WORLD, chunk_numel=20)
    (grad,) = torch.autograd.grad((entropies * weights).sum(), part)
    return entropies.detach(), grad


def test_distribution_entropies_vocabulary_parallel(parts: list[tuple[Any, ...]]) -> None:
    logits, weights = drawn()
    logits.requires_grad_()
    expected = distribution_entropies(logits)
    (grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    found = [of_logits for of_logits, *_ in parts]
    for entropies, _ in found:
        torch.testing.assert_close(entropies, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.cat([part for _, part in found], dim=-1), grad, atol=1e-5, rtol=1e-5
    )


def test_loss_operators_without_npu_kernels() -> None:
    """torch_npu has no kernel of special.entr."""
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


# --- with the output layer ------------------------------------------------------------------------


def both(*given: torch.Tensor, **how: Any) -> list[torch.Tensor]:
    """Return log-probabilities and entropies."""
    logprobs, entropies = token_statistics(*given, with_entropies=True, **how)
    assert entropies is not None
    return [logprobs, entropies]


def soft_cap(logits: torch.Tensor) -> torch.Tensor:
    return torch.tanh(logits / 5.0) * 5.0


@pytest.mark.parametrize("transform", [None, soft_cap], ids=["plain", "capped"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kept_numel", [0, 1 << 24])
@pytest.mark.parametrize("chunk_numel", [1, 60, 1 << 24])
def test_output_layer_equals_plain_torch(
    monkeypatch: pytest.MonkeyPatch,
    chunk_numel: int,
    kept_numel: int,
    has_bias: bool,
    transform: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    monkeypatch.setattr(vocabulary, "_KEPT_NUMEL", kept_numel)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 6, generator=random, requires_grad=True)
    weight = (torch.randn(20, 6, generator=random) * 2).requires_grad_()
    bias = torch.randn(20, generator=random, requires_grad=True) if has_bias else None
    inputs = [each for each in (hidden, weight, bias) if each is not None]
    targets = torch.randint(0, 20, (3, 7), generator=random)
    grads = torch.randn(2, 3, 7, generator=random)
    layer = OutputLayer(weight, bias, transform)
    found = both(hidden, targets, layer=layer, chunk_numel=chunk_numel)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    distribution = torch.distributions.Categorical(
        logits=transform(logits) if transform else logits
    )
    expected = (distribution.log_prob(targets), distribution.entropy())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for one, other in zip(
        torch.autograd.grad(found, inputs, list(grads)),
        torch.autograd.grad(expected, inputs, list(grads)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_output_layer_half_precision_sums_in_float32() -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(512, 6, generator=random), torch.randn(20, 6, generator=random)
    targets = torch.randint(0, 20, (512,), generator=random)
    grads: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        own = weight.to(dtype).requires_grad_()
        found = token_statistics(
            hidden.to(dtype), targets, layer=OutputLayer(own), chunk_numel=20
        ).logprobs
        assert found.dtype == torch.float32
        grads += torch.autograd.grad(found.sum(), own)
    exact, rounded = grads
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.01 * exact.norm()


def of_a_part_of_the_layer() -> list[torch.Tensor]:
    hidden, weight, targets, grads = drawn_layer()
    part = weight.chunk(2)[dist.get_rank()].clone().requires_grad_()
    layer = OutputLayer(part, None, soft_cap)
    hidden.requires_grad_()
    found = both(hidden, targets, layer=layer, group=dist.group.WORLD, chunk_numel=20)
    slopes = torch.autograd.grad(found, [hidden, part], list(grads))
    return [each.detach() for each in (*found, *slopes)]


def drawn_layer() -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(4)
    return (
        torch.randn(3, 5, 6, generator=random),
        torch.randn(8, 6, generator=random),
        torch.randint(0, 8, (3, 5), generator=random),
        torch.randn(2, 3, 5, generator=random),
    )


def test_output_layer_vocabulary_parallel(parts: list[tuple[Any, ...]]) -> None:
    hidden, weight, targets, grads = drawn_layer()
    whole = OutputLayer(weight.requires_grad_(), None, soft_cap)
    found = both(hidden.requires_grad_(), targets, layer=whole)
    slopes = torch.autograd.grad(found, [hidden, weight], list(grads))
    of_layer = [each for _, each, _ in parts]
    for *statistics, hidden_slope, _ in of_layer:
        for one, other in zip((*statistics, hidden_slope), (*found, slopes[0]), strict=True):
            torch.testing.assert_close(one, other.detach(), atol=1e-5, rtol=1e-5)
    joined = torch.cat([weight_slope for *_, weight_slope in of_layer])
    torch.testing.assert_close(joined, slopes[1], atol=1e-5, rtol=1e-5)


# --- several tokens of each distribution ----------------------------------------------------------


def several() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, the layer's weight, three targets of each, and their gradients.

    A target may occur twice.
    """
    hidden, weight, _, _ = drawn_layer()
    random = torch.Generator().manual_seed(5)
    targets = torch.randint(0, 8, (3, 5, 3), generator=random)
    return hidden, weight, targets, torch.randn(3, 5, 3, generator=random)


def choices_of_a_part() -> list[torch.Tensor]:
    hidden, weight, targets, grads = several()
    part = weight.chunk(2)[dist.get_rank()].clone().requires_grad_()
    layer, group = OutputLayer(part, None, soft_cap), dist.group.WORLD
    hidden.requires_grad_()
    found = token_statistics(hidden, targets, layer=layer, group=group, chunk_numel=20).logprobs
    slopes = torch.autograd.grad(found, [hidden, part], grads)
    # More choices than a rank has ids, of ids of which the second rank has one.
    ids, logprobs = top_choices(hidden, 5, 5, layer=layer, group=group, chunk_numel=20)
    return [each.detach() for each in (found, *slopes, ids, logprobs)]


def several_expected() -> list[torch.Tensor]:
    hidden, weight, targets, grads = several()
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    every = soft_cap(torch.nn.functional.linear(*inputs)).log_softmax(-1)
    found = every.gather(-1, targets)
    best = every[..., :5].topk(5)
    slopes = torch.autograd.grad(found, inputs, grads)
    return [each.detach() for each in (found, *slopes, best.indices, best.values)]


@pytest.mark.parametrize("chunk_numel", [1, 20, 1 << 24])
def test_several_targets_and_top_choices_equal_plain_torch(chunk_numel: int) -> None:
    hidden, weight, targets, grads = several()
    layer = OutputLayer(weight.requires_grad_(), None, soft_cap)
    hidden.requires_grad_()
    found = token_statistics(hidden, targets, layer=layer, chunk_numel=chunk_numel).logprobs
    slopes = torch.autograd.grad(found, [hidden, weight], grads)
    choices = top_choices(hidden, 5, 5, layer=layer, chunk_numel=chunk_numel)
    assert not choices.logprobs.requires_grad
    for one, other in zip((found, *slopes, *choices), several_expected(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_several_targets_and_top_choices_vocabulary_parallel(parts: list[tuple[Any, ...]]) -> None:
    found, hidden_slope, weight_slope, *choices = several_expected()
    for *_, of_choices in parts:
        own = (of_choices[0], of_choices[1], *of_choices[3:])
        for one, other in zip(own, (found, hidden_slope, *choices), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    joined = torch.cat([of_choices[2] for *_, of_choices in parts])
    torch.testing.assert_close(joined, weight_slope, atol=1e-5, rtol=1e-5)


def test_top_choices_of_logits_leave_the_rest_its_share() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 9.0]])
    found = top_choices(logits, 2, 3)
    assert found.ids.tolist() == [[0, 2]]
    assert found.logprobs.exp().sum() < 0.01, "most of the probability is that of id 3"
    assert logits.tolist() == [[3.0, 1.0, 2.0, 9.0]]
