"""Test a teacher's choices, and the losses of a student on them, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helmsman.engines.train import FSDPTrainEngine
from tests.engines.conftest import Make
from tests.engines.ranks import run_ranks
from tests.engines.small_models import LLAMA, QWEN2, random_tokens

PADDED = {**QWEN2, "vocab_size": 52}
"""A teacher with more rows of logits than the student has."""
SAMPLES: list[dict[str, Any]] = [
    {
        "input_ids": random_tokens(length, seed=length),
        "loss_mask": [index >= 2 for index in range(length)],
        "logprobs": [-1.0] * length,
        "advantages": 0.0,
    }
    for length in (5, 9, 12, 20, 7, 3, 15)
]
TOKENS = [{"input_ids": sample["input_ids"]} for sample in SAMPLES]
TOP, IDS = 4, 50


def distribution(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities (T - 1, V) of each token but the first, by plain torch."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return torch.as_tensor(logits.log_softmax(-1))


def plain(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()


def choices(teacher: FSDPTrainEngine) -> list[dict[str, Any]]:
    found = teacher.forward_top(TOKENS, TOP, IDS)
    return [
        {**sample, "top_ids": ids, "top_logprobs": logprobs, "top_coef": 0.5}
        for sample, (ids, logprobs) in zip(SAMPLES, found, strict=True)
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_forward_top_equals_plain_torch(make: Make, packing: bool) -> None:
    teacher = make(
        model=PADDED, frozen=True, packing=packing, max_tokens_per_micro_batch=30, seed=0
    )
    weights = teacher.export_weights()
    model = plain(PADDED)
    model.load_state_dict(weights, strict=False)
    for sample, (ids, logprobs) in zip(TOKENS, teacher.forward_top(TOKENS, TOP, IDS), strict=True):
        expected = distribution(model, sample["input_ids"])[:, :IDS].topk(TOP)
        assert ids.shape == logprobs.shape == (len(sample["input_ids"]), TOP)
        assert ids.dtype == torch.int32
        assert not ids[0].any()
        assert not logprobs[0].any()
        torch.testing.assert_close(logprobs[1:], expected.values, atol=1e-5, rtol=1e-5)
        assert torch.equal(ids[1:].long(), expected.indices)
    for wrong in (0, 53):
        with pytest.raises(ValueError, match=f"num_choices is {wrong}, and the model has 52 ids"):
            teacher.forward_top(TOKENS, wrong)
    with pytest.raises(ValueError, match="expected 1 to 3, and the head"):
        teacher.forward_top(TOKENS, 4, 3)
    critic = make(head="value", frozen=True)
    with pytest.raises(ValueError, match="and the head 'value'; expected 1 to 50, and the head"):
        critic.forward_top(TOKENS, 2)


@pytest.mark.parametrize("loss", ["reverse", "forward", "grpo"])
def test_student_loss_equals_plain_torch(make: Make, loss: str) -> None:
    teacher, student = make(model=PADDED, frozen=True), make(model=LLAMA)
    models = [plain(PADDED), plain(LLAMA)]
    for model, engine in zip(models, (teacher, student), strict=True):
        model.load_state_dict(engine.export_weights(), strict=False)
    total, count = torch.zeros(()), 0
    for sample in SAMPLES:
        q, p = (distribution(model, sample["input_ids"]) for model in models)
        ids = q[:, :IDS].topk(TOP).indices
        own, other = (each.exp().gather(-1, ids) for each in (p, q))
        own, other = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (own, other))
        own, other = (other, own) if loss == "forward" else (own, other)
        mask = torch.tensor(sample["loss_mask"])[1:]
        total = total + ((own * (own / other).log()).sum(-1) * mask).sum()
        count += int(mask.sum())
    expected = total / count
    samples = choices(teacher)
    if loss == "grpo":  # without rewards
        found = student.train_batch(samples, "grpo")
        assert found["teacher_kl"] == pytest.approx(expected.item(), rel=1e-5)
        expected = expected * 0.5
    else:
        found = student.train_batch(samples, "distill", {"direction": loss})
    assert found["loss"] == pytest.approx(expected.item(), abs=1e-6, rel=1e-6)
    expected.backward()
    grads = [each.grad for each in models[1].parameters() if each.grad is not None]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def of_ranks(fields: dict[str, Any]) -> tuple[list[Any], list[dict[str, float]]]:
    """Return the choices of a teacher, and the steps of a student."""
    limits: dict[str, Any] = {"rendezvous_timeout_s": 60, "max_tokens_per_micro_batch": 36}
    teacher = FSDPTrainEngine(model=PADDED, frozen=True, **limits, **fields)
    student = FSDPTrainEngine(model={**LLAMA, "vocab_size": 50}, lr=1e-3, **limits, **fields)
    for engine in (teacher, student):
        engine.initialize()
    rank, size = student.data_parallel_rank, student.data_parallel_world_size
    samples = choices(teacher)
    steps = [
        student.train_batch(samples[rank::size], *how)
        for how in (("distill", {"direction": "reverse"}), ("distill", {"hard": 0.5}), ("grpo",))
    ]
    for engine in (student, teacher):
        engine.destroy()
    return [(each["top_ids"], each["top_logprobs"]) for each in samples], steps


@pytest.fixture(scope="module")
def alone() -> tuple[list[Any], list[dict[str, float]]]:
    (result,) = run_ranks(of_ranks, 1, {})
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize("field", ["", "tensor_parallel_size", "context_parallel_size"])
def test_two_ranks_equal_one(field: str, alone: tuple[list[Any], list[dict[str, float]]]) -> None:
    first, second = run_ranks(of_ranks, 2, {field: 2} if field else {})
    assert first[1] == second[1]
    for (ids, logprobs), (expected_ids, expected) in zip(first[0], alone[0], strict=True):
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    for step, expected in zip(first[1], alone[1], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-6, rel=1e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
