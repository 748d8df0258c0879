"""Test engines with a value head and frozen engines, on one rank in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from helmsman.engines._models.model import build_model
from tests.engines.conftest import Make
from tests.engines.small_models import (
    GEMMA3_MIXED,
    GPT2,
    LLAMA,
    MISTRAL_SLIDING,
    QWEN2,
    random_tokens,
)

MODELS = [QWEN2, LLAMA, GPT2, MISTRAL_SLIDING, GEMMA3_MIXED]
SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12, 20)]
CRITIC_SAMPLES = [{**sample, "returns": 1.5} for sample in SAMPLES]


def scores(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Return the scores of transformers for each prefix of some tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        rows = [
            model(input_ids=torch.tensor([tokens[: end + 1]])).logits[0, 0]
            for end in range(len(tokens))
        ]
    return torch.stack(rows)


@pytest.mark.parametrize("model", MODELS, ids=lambda config: config["model_type"])
def test_value_head_equals_transformers(model: dict[str, Any], make: Make, tmp_path: Path) -> None:
    engine = make(head="value", model=model, max_tokens_per_micro_batch=24)
    engine.train_batch(CRITIC_SAMPLES, "value")
    engine.export_hf(str(tmp_path / "critic"))
    values = engine.forward(SAMPLES)
    assert [(row.dtype, len(row)) for row in values] == [
        (torch.float32, len(sample["input_ids"])) for sample in SAMPLES
    ]
    torch.testing.assert_close(
        values[1], scores(tmp_path / "critic", SAMPLES[1]["input_ids"]), atol=1e-4, rtol=1e-4
    )
    (architecture,) = json.loads((tmp_path / "critic" / "config.json").read_text())["architectures"]
    assert architecture.endswith("ForSequenceClassification")


def test_value_head_from_policy_folder(make: Make, tmp_path: Path) -> None:
    policy = build_model(LLAMA, seed=3, dtype=torch.float32)
    policy.save_pretrained(tmp_path / "policy")  # type: ignore[operator]
    state = torch.random.get_rng_state()
    fields = {"head": "value", "init": "value_head", "model": str(tmp_path / "policy")}
    weights = make(**fields, seed=1).export_weights()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert weights is not None
    head = weights.pop("score.weight")
    own = policy.state_dict()
    assert own.keys() - weights.keys() == {"lm_head.weight"}
    assert all(torch.equal(tensor, own[name]) for name, tensor in weights.items())
    assert head.shape == (1, 32)
    same, other = (
        build_model(str(tmp_path / "policy"), seed=seed, dtype=torch.float32, head="value")
        for seed in (1, 2)
    )
    assert torch.equal(same.state_dict()["score.weight"], head)
    assert not torch.equal(other.state_dict()["score.weight"], head)


def test_value_head_load_continues(make: Make, tmp_path: Path) -> None:
    engine = make(head="value")
    engine.train_batch(CRITIC_SAMPLES, "value")
    engine.save(str(tmp_path / "critic"))
    expected = [engine.train_batch(CRITIC_SAMPLES, "value") for _ in range(2)]
    other = make(head="value", seed=5)
    other.load(str(tmp_path / "critic"))
    assert [other.train_batch(CRITIC_SAMPLES, "value") for _ in range(2)] == expected
    begun = make(head="value", model=str(tmp_path / "critic"))
    engine.load(str(tmp_path / "critic"))
    for mine, theirs in zip(begun.forward(SAMPLES), engine.forward(SAMPLES), strict=True):
        assert torch.equal(mine, theirs)


def test_load_other_head(make: Make, tmp_path: Path) -> None:
    critic, policy = make(head="value"), make()
    critic.save(str(tmp_path / "critic"))
    policy.save(str(tmp_path / "policy"))
    with pytest.raises(
        ValueError, match="holds a Qwen2ForSequenceClassification; expected one with the head 'lm'"
    ):
        build_model(str(tmp_path / "critic"), seed=0, dtype=torch.float32)
    with pytest.raises(
        ValueError, match="holds a Qwen2ForSequenceClassification; expected one with the head 'lm'"
    ):
        policy.load(str(tmp_path / "critic"))
    with pytest.raises(
        ValueError, match="holds a Qwen2ForCausalLM; expected one with the head 'value'"
    ):
        critic.load(str(tmp_path / "policy"))
    with pytest.raises(
        ValueError,
        match="loss 'sft' is for a model with the head 'lm'; this engine's TrainConfig.head is "
        "'value'",
    ):
        critic.train_batch(SAMPLES, "sft")
    assert critic.get_version() == 0


def test_frozen_forwards_and_refuses_steps(make: Make, tmp_path: Path) -> None:
    policy, reference = make(), make(frozen=True)
    for mine, theirs in zip(policy.forward(SAMPLES), reference.forward(SAMPLES), strict=True):
        assert torch.equal(mine, theirs)
    assert policy.eval_batch(SAMPLES, "sft") == reference.eval_batch(SAMPLES, "sft")
    assert not any(parameter.requires_grad for parameter in reference._built_model().parameters())
    for call in (
        lambda: reference.train_batch(SAMPLES, "sft"),
        lambda: reference.save(str(tmp_path / "x")),
        lambda: reference.load(str(tmp_path / "x")),
    ):
        with pytest.raises(RuntimeError, match="this train engine is frozen"):
            call()
    assert not list(tmp_path.iterdir())


def test_frozen_parameter_dtype(make: Make) -> None:
    reference = make(frozen=True, compute_dtype="bfloat16")
    trained = make(compute_dtype="bfloat16")
    assert {parameter.dtype for parameter in reference._built_model().parameters()} == {
        torch.bfloat16
    }
    for mine, theirs in zip(reference.forward(SAMPLES), trained.forward(SAMPLES), strict=True):
        assert torch.equal(mine, theirs)


def test_train_batch_entropy_bonus(make: Make) -> None:
    """One step on the entropy alone equals that of plain torch."""
    engine = make(model=LLAMA, max_tokens_per_micro_batch=24, max_grad_norm=None)
    weights = engine.export_weights()
    assert weights is not None
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    reference.load_state_dict(weights)
    total, count = torch.zeros(()), 0
    for sample in SAMPLES:
        logits = reference(input_ids=torch.tensor([sample["input_ids"]])).logits[0, :-1]
        total = total + torch.distributions.Categorical(logits=logits).entropy().sum()
        count += len(logits)
    (-0.5 * total / count).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in reference.parameters()])  # type: ignore[misc]
    batch = [
        {**sample, "logprobs": row, "advantages": 0.0}
        for sample, row in zip(SAMPLES, engine.forward(SAMPLES), strict=True)
    ]
    stats = engine.train_batch(batch, "grpo", {"entropy_coef": 0.5})
    assert stats["entropy"] == pytest.approx(total.item() / count, rel=1e-5)
    assert stats["loss"] == pytest.approx(-0.5 * total.item() / count, rel=1e-5)
    assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
