"""Train small models on ranks that divide the work in several ways, and compare with one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.ranks import run_ranks
from tests.engines.small_models import GEMMA3_MIXED, LLAMA, MIXTRAL, QWEN2, random_tokens

VOCAB = {"vocab_size": 52}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        **LLAMA,
        **VOCAB,
        "attention_bias": True,
        "mlp_bias": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    # Tied; its padding token is also a token of the samples.
    "qwen2": {**QWEN2, **VOCAB, "pad_token_id": 3},
    "qwen3": {**QWEN2, **VOCAB, "model_type": "qwen3", "head_dim": 8},
    "mixtral": {**MIXTRAL, **VOCAB},
    "gemma3": {**GEMMA3_MIXED, **VOCAB, "tie_word_embeddings": True},
}
SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12, 20, 7, 3, 15)]
NUM_STEPS = {"llama": 3}
"""Steps of a model, by default 2."""
LIMIT_S = 250.0
TENSOR = {"tensor_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
BOTH = {"tensor_parallel_size": 2, "context_parallel_size": 2}


def share(step: int, rank: int, num_ranks: int) -> list[dict[str, Any]]:
    """Return a data-parallel rank's share of the batch, which is empty in some steps."""
    if step % 3 == 1:
        return SAMPLES if rank == num_ranks - 1 else []
    return SAMPLES[rank::num_ranks]


def build(model: str | dict[str, Any], **fields: Any) -> FSDPTrainEngine:
    engine = FSDPTrainEngine(
        model=MODELS[model] if isinstance(model, str) else model,
        lr=1e-3,
        max_tokens_per_micro_batch=36,
        rendezvous_timeout_s=LIMIT_S,
        collective_timeout_s=LIMIT_S,
        **fields,
    )
    engine.create_process_group()
    try:
        engine.initialize()
    except BaseException:
        engine.destroy()
        raise
    return engine


def limits_s(engine: FSDPTrainEngine) -> set[float]:
    """Return the timeouts of collectives of an engine's groups."""
    mesh = engine._mesh
    assert mesh is not None
    groups = [
        *mesh.data.get_all_groups(),
        mesh.tensor and mesh.tensor.get_group(),
        mesh.model_group,
        mesh.context_group,
    ]
    return {
        each._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for each in groups
        if each is not None
    }


def mean_loss(model: Any, samples: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Return the mean loss of all tokens but the first ones, by plain torch."""
    losses = []
    for sample in samples:
        tokens = torch.tensor(sample["input_ids"])
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
    return torch.stack(losses).sum() / sum(len(each["input_ids"]) - 1 for each in samples)


def train(engine: FSDPTrainEngine, num_steps: int) -> list[dict[str, float]]:
    rank, num_ranks = engine.data_parallel_rank, engine.data_parallel_world_size
    return [engine.train_batch(share(step, rank, num_ranks), "sft") for step in range(num_steps)]


def run(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    engine = build(model, **fields)
    result: dict[str, Any] = {
        "steps": train(engine, NUM_STEPS.get(model, 2)),
        "coordinates": (engine.data_parallel_rank, engine.data_parallel_world_size),
        "limits_s": limits_s(engine),
    }
    result["forward"] = engine.forward(SAMPLES)
    result["weights"] = engine.export_weights()
    engine.destroy()
    return result


class Case(NamedTuple):
    """A way to divide the work.

    Attributes:
        num_ranks: The number of ranks.
        model: The name of the model.
        fields: The fields of TrainConfig.
    """

    num_ranks: int
    model: str
    fields: dict[str, Any]


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    """Run the cases of this number of ranks, one after the other."""
    join_process_group(rendezvous_timeout_s=LIMIT_S, collective_timeout_s=LIMIT_S)
    try:
        return [run(case.model, case.fields) for case in cases]
    finally:
        leave_process_group()


def run_alone(models: set[str]) -> dict[str, dict[str, Any]]:
    """Run models on one rank, whose samples are padded: nothing is divided."""
    cases = [Case(1, model, {"packing": False}) for model in sorted(models)]
    (results,) = run_ranks(run_cases, 1, cases)
    return {case.model: result for case, result in zip(cases, results, strict=True)}


def require_equal(case: Case, results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Check the results of all ranks against those of one rank."""
    fields = case.fields
    model_size = fields.get("tensor_parallel_size", 1) * fields.get("context_parallel_size", 1)
    for rank, result in enumerate(results):
        assert result["coordinates"] == (rank // model_size, case.num_ranks // model_size)
        assert result["steps"] == results[0]["steps"]
        assert result["limits_s"] == {LIMIT_S}
        assert (result["weights"] is None) == (rank > 0)
        for mine, theirs in zip(result["forward"], expected["forward"], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
    first, *_ = results
    for mine, theirs in zip(first["steps"], expected["steps"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert mine["num_tokens"] == theirs["num_tokens"]
    assert {name: each.shape for name, each in first["weights"].items()} == {
        name: each.shape for name, each in expected["weights"].items()
    }
    for name, each in first["weights"].items():
        torch.testing.assert_close(each, expected["weights"][name], atol=1e-3, rtol=1e-3)
