"""However the ranks divide the work, the losses are those of one rank: FSDP, tensor and context
parallelism, packing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from helmsman.api.errors import ParallelLayoutError
from helmsman.api.weights import (
    DiskTarget,
    MemoryTarget,
    WeightFormat,
    WeightsInMemory,
    WeightsOnDisk,
)
from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.losses import sft_loss
from helmsman.engines.train import FSDPTrainEngine
from helmsman.engines.weight_transfer import incoming
from tests.engines.conftest import Make
from tests.engines.ranks import run_ranks
from tests.engines.small_models import GEMMA3_MIXED, GPT2, LLAMA, QWEN2, random_tokens

pytestmark = pytest.mark.timeout(600)

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
    "gemma3": {**GEMMA3_MIXED, **VOCAB, "tie_word_embeddings": True},
}
SIX_HEADS = {
    **LLAMA,
    **VOCAB,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12, 20, 7, 3, 15)]
NUM_STEPS = {"llama": 3}
"""Of some models more than of others, whose layouts are what matters."""
LIMIT_S = 250.0
TENSOR, CONTEXT, BOTH = (
    {"tensor_parallel_size": 2},
    {"context_parallel_size": 2},
    {"tensor_parallel_size": 2, "context_parallel_size": 2},
)
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("gemma3", {}), ("qwen2", {"gradient_checkpointing": True})],
    2: [
        ("llama", {"data_parallel_replicas": 2}),
        ("llama", TENSOR),
        ("qwen2", {**TENSOR, "packing": False}),
        ("gemma3", CONTEXT),
        ("qwen3", {**CONTEXT, "packing": False}),
    ],
    4: [
        ("qwen3", {**TENSOR, "data_parallel_replicas": 2}),
        ("gemma3", BOTH),
        ("llama", {**BOTH, "gradient_checkpointing": True}),
        ("llama", {"context_parallel_size": 4}),  # more than there are heads of keys and values
    ],
}


def share(step: int, rank: int, num_ranks: int) -> list[dict[str, Any]]:
    """What a data-parallel rank gets of the batch, which is the same in every step; at times one of
    them gets nothing.
    """
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
        engine.destroy()  # other worlds must not find the process group
        raise
    return engine


def limits_s(engine: FSDPTrainEngine) -> set[float]:
    """How long collectives of an engine's groups wait."""
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


def all_cases(world_size: int, folder: str) -> dict[str, Any]:
    join_process_group(rendezvous_timeout_s=LIMIT_S, collective_timeout_s=LIMIT_S)
    result: dict[str, Any] = {"cases": [run(model, fields) for model, fields in CASES[world_size]]}
    if world_size == 4:
        result |= {"saved": save(folder), "published": published(folder), "errors": errors()}
    if world_size == 2:
        result["loaded"] = [load(folder, fields) for fields in ({}, TENSOR)]
        result["num_sums"] = num_sums()
    leave_process_group()
    return result


def save(folder: str) -> list[dict[str, float]]:
    engine = build("qwen2", **TENSOR)
    train(engine, 2)
    engine.save(f"{folder}/checkpoint")
    steps = train(engine, 2)
    engine.eval_batch(SAMPLES, "sft")  # a pass without a backward pass leaves nothing gathered
    engine.load(f"{folder}/checkpoint")
    again = train(engine, 2)
    engine.destroy()
    assert steps == again
    return steps


def load(folder: str, fields: dict[str, Any]) -> list[dict[str, float]]:
    engine = build("qwen2", **fields)
    engine.load(f"{folder}/checkpoint")
    steps = train(engine, 2)
    engine.destroy()
    return steps


def published(folder: str) -> dict[str, Any]:
    engine = build("qwen2", **TENSOR)
    train(engine, 1)
    version = engine.get_version()
    with CommDebugMode() as collectives:
        in_memory = engine.publish_weights(MemoryTarget(version=version), WeightFormat())
    on_disk = engine.publish_weights(
        DiskTarget(version=version, folder=f"{folder}/published", num_kept=1), WeightFormat()
    )
    exported = engine.export_weights()
    engine.destroy()
    if dist.get_rank():
        return {}
    group = WeightGroup(torch.device("cpu"))
    read = []
    for sent in (in_memory, on_disk):
        assert isinstance(sent, WeightsInMemory | WeightsOnDisk)
        with incoming(sent, group) as buckets:
            read.append({name: each.clone() for bucket in buckets for name, each in bucket.items()})
    group.close()
    num_gathers = collectives.get_comm_counts()[torch.ops.c10d._allgather_base_]
    return {
        "exported": exported,
        "memory": read[0],
        "disk": read[1],
        "num_gathers": num_gathers,
    }


def num_sums() -> int:
    """Sums over tensor-parallel ranks in one step of one micro-batch, and that of the norm."""
    engine = build("llama", **TENSOR)
    with CommDebugMode() as collectives:
        engine.train_batch(SAMPLES[:2], "sft")
    engine.destroy()
    return sum(
        num
        for kind, num in collectives.get_comm_counts().items()
        if "allreduce" in str(kind).replace("_", "")
    )


def fails_on_rank_three(
    logprobs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if dist.get_rank() == 3:
        raise ArithmeticError("rank 3 has had enough")
    return sft_loss(logprobs, batch)


def errors() -> dict[str, Any]:
    engine = build("qwen3", **TENSOR)
    rank = dist.get_rank()
    found: dict[str, Any] = {}

    def attempt(name: str, step: Callable[[], object]) -> None:
        try:
            step()
        except (ValueError, ArithmeticError, RuntimeError) as error:
            found[name] = (type(error).__name__, str(error))

    attempt("loss", lambda: engine.train_batch(SAMPLES, fails_on_rank_three))
    attempt(
        "malformed",
        lambda: engine.train_batch([{"input_ids": [99]}] if rank == 3 else SAMPLES, "sft"),
    )
    attempt(
        "other samples", lambda: engine.train_batch(SAMPLES[:2] if rank == 1 else SAMPLES, "sft")
    )
    found["version"] = engine.get_version()
    found["after"] = train(engine, 2)
    engine.destroy()
    attempt("no plan", lambda: build(GPT2, **TENSOR))
    attempt("vocabulary", lambda: build({**LLAMA, "vocab_size": 51}, **TENSOR))
    attempt("heads", lambda: build("gemma3", tensor_parallel_size=4))
    attempt("context heads", lambda: build(SIX_HEADS, **BOTH))
    attempt("world", lambda: build("qwen2", tensor_parallel_size=3))
    return found


# --- on one rank ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def four_ranks(folder: str) -> list[dict[str, Any]]:
    return run_ranks(all_cases, 4, 4, folder)


@pytest.fixture(scope="module")
def worlds(folder: str, four_ranks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    return {
        4: four_ranks,
        2: run_ranks(all_cases, 2, 2, folder),
        1: run_ranks(all_cases, 1, 1, folder),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """Each model on one rank, its samples padded: nothing is divided."""
    (results,) = run_ranks(undivided, 1)
    return results


def undivided() -> dict[str, dict[str, Any]]:
    return {model: run(model, {"packing": False}) for model in MODELS}


@pytest.mark.parametrize(
    ("world_size", "number"),
    [(world_size, number) for world_size, cases in CASES.items() for number in range(len(cases))],
    ids=lambda value: str(value),
)
def test_train_batch_equals_one_rank(
    worlds: dict[int, list[dict[str, Any]]],
    alone: dict[str, dict[str, Any]],
    world_size: int,
    number: int,
) -> None:
    model, fields = CASES[world_size][number]
    expected = alone[model]
    results = [rank["cases"][number] for rank in worlds[world_size]]
    model_size = fields.get("tensor_parallel_size", 1) * fields.get("context_parallel_size", 1)
    for rank, result in enumerate(results):
        assert result["coordinates"] == (rank // model_size, world_size // model_size)
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


def test_load_on_other_ranks_and_layouts(worlds: dict[int, list[dict[str, Any]]]) -> None:
    saved = worlds[4][0]["saved"]
    for steps in worlds[2][0]["loaded"]:
        for mine, theirs in zip(steps, saved, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_train_batch_num_sums_of_a_layer(worlds: dict[int, list[dict[str, Any]]]) -> None:
    # As in Megatron-LM, arXiv:1909.08053, figure 4; and one each for embeddings and logits,
    # and one for the norm of the gradient.
    assert worlds[2][0]["num_sums"] == 2 * (2 + 2) + 2 + 1


def test_publish_weights_whole_with_names(four_ranks: list[dict[str, Any]]) -> None:
    published = four_ranks[0]["published"]
    assert "lm_head.weight" not in published["exported"]  # tied
    for way in ("memory", "disk"):
        assert published[way].keys() == published["exported"].keys()
        for name, each in published["exported"].items():
            assert torch.equal(published[way][name], each), name


def test_publish_weights_gathers_together(four_ranks: list[dict[str, Any]]) -> None:
    """Tensor-parallel shards along both axes of the mesh, norms in one of them or in both."""
    assert four_ranks[0]["published"]["num_gathers"] <= 4


def test_train_batch_failure_of_one_rank(
    four_ranks: list[dict[str, Any]], alone: dict[str, dict[str, Any]]
) -> None:
    found = [rank["errors"] for rank in four_ranks]
    assert found[3]["loss"] == ("ArithmeticError", "rank 3 has had enough")
    assert found[3]["malformed"][0] == "ValueError"
    for rank in range(3):
        for name in ("loss", "malformed"):
            kind, message = found[rank][name]
            assert kind == "RuntimeError"
            assert "failed on another rank" in message
            assert "rank 3: " in message
    for errors_of_rank in found:
        kind, message = errors_of_rank["other samples"]
        assert kind == "ValueError"
        assert "rank(s) [1] got other samples than the head" in message
        assert errors_of_rank["version"] == 0
        for mine, theirs in zip(errors_of_rank["after"], alone["qwen3"]["steps"], strict=False):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


def test_initialize_indivisible_layouts(four_ranks: list[dict[str, Any]]) -> None:
    for rank in four_ranks:
        found = rank["errors"]
        assert found["no plan"][0] == "ValueError"
        assert "GPT2LMHeadModel (gpt2) declares no plan" in found["no plan"][1]
        assert found["vocabulary"][0] == ParallelLayoutError.__name__
        assert (
            "it does not divide the vocabulary size, 51. Set tensor_parallel_size to 1"
            in found["vocabulary"][1]
        )
        assert found["heads"][0] == ParallelLayoutError.__name__
        assert (
            "it does not divide num_key_value_heads, 2. Set tensor_parallel_size to 1 or 2"
            in found["heads"][1]
        )
        assert found["context heads"][0] == ParallelLayoutError.__name__
        assert (
            "it does not divide the 3 heads of each tensor-parallel rank (num_attention_heads is 6)"
            in found["context heads"][1]
        )
        assert found["world"][0] == ParallelLayoutError.__name__
        assert "it does not divide the world size, 4" in found["world"][1]


def test_packing_unsupported_model(make: Make) -> None:
    hybrid = {**QWEN2, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    with pytest.raises(
        ValueError,
        match="packing is not supported for Lfm2ForCausalLM: it has layers of other kinds",
    ):
        make(model=hybrid, packing=True)
    counted = make(model=hybrid).eval_batch(SAMPLES, "sft")["num_tokens"]
    assert counted == sum(len(sample["input_ids"]) - 1 for sample in SAMPLES)
