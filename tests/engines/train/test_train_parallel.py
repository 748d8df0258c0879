"""Test that losses equal those of one rank however the ranks divide the work: FSDP, tensor and
context parallelism, packing.
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
from helmsman.engines.weight_transfer import incoming
from tests.engines.conftest import Make
from tests.engines.ranks import run_ranks
from tests.engines.small_models import GPT2, LLAMA, QWEN2
from tests.engines.train.layouts import (
    BOTH,
    CONTEXT,
    LIMIT_S,
    SAMPLES,
    TENSOR,
    VOCAB,
    Case,
    build,
    require_equal,
    run_alone,
    run_cases,
    train,
)

pytestmark = pytest.mark.timeout(300)

CASES = [
    Case(1, "gemma3", {}),
    Case(2, "llama", {"data_parallel_replicas": 2}),
    Case(2, "llama", TENSOR),
    Case(2, "gemma3", CONTEXT),
    Case(4, "llama", {**BOTH, "gradient_checkpointing": True}),
]
SIX_HEADS = {
    **LLAMA,
    **VOCAB,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def on_ranks(num_ranks: int, folder: str) -> dict[str, Any]:
    join_process_group(rendezvous_timeout_s=LIMIT_S, collective_timeout_s=LIMIT_S)
    result: dict[str, Any] = {
        "cases": run_cases([case for case in CASES if case.num_ranks == num_ranks])
    }
    if num_ranks == 4:
        result |= {"saved": save(folder), "published": published(folder), "errors": errors()}
    if num_ranks == 2:
        result |= {"loaded": load(folder), "num_sums": num_sums()}
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


def load(folder: str) -> list[dict[str, float]]:
    engine = build("qwen2")
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
    """Count the sums over tensor-parallel ranks in a step of one micro-batch."""
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
        raise ArithmeticError("rank 3 fails")
    return sft_loss(logprobs, batch)


def errors() -> dict[str, Any]:
    engine = build("llama", **TENSOR)
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
    return run_ranks(on_ranks, 4, 4, folder)


@pytest.fixture(scope="module")
def worlds(folder: str, four_ranks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    return {
        4: four_ranks,
        2: run_ranks(on_ranks, 2, 2, folder),
        1: run_ranks(on_ranks, 1, 1, folder),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return run_alone({case.model for case in CASES})


def test_train_batch_equals_one_rank(
    worlds: dict[int, list[dict[str, Any]]], alone: dict[str, dict[str, Any]]
) -> None:
    for num_ranks, ranks in worlds.items():
        cases = [case for case in CASES if case.num_ranks == num_ranks]
        for number, case in enumerate(cases):
            require_equal(case, [rank["cases"][number] for rank in ranks], alone[case.model])


def test_load_on_other_ranks_and_layouts(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for mine, theirs in zip(worlds[2][0]["loaded"], worlds[4][0]["saved"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_train_batch_num_sums(worlds: dict[int, list[dict[str, Any]]]) -> None:
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
    """The parameters are sharded along one or both axes of the mesh."""
    assert four_ranks[0]["published"]["num_gathers"] <= 4


def test_train_batch_failure_of_one_rank(
    four_ranks: list[dict[str, Any]], alone: dict[str, dict[str, Any]]
) -> None:
    found = [rank["errors"] for rank in four_ranks]
    assert found[3]["loss"] == ("ArithmeticError", "rank 3 fails")
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
        for mine, theirs in zip(errors_of_rank["after"], alone["llama"]["steps"], strict=False):
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
