"""Two ranks give the results of one, whatever each of them got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helmsman.engines.train import FSDPTrainEngine
from tests.engines.ranks import run_ranks
from tests.engines.small_models import QWEN2, random_tokens

SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12, 20, 7, 3)]
SHARES = [(SAMPLES[:1], SAMPLES[1:]), (SAMPLES[:3], SAMPLES[3:]), (SAMPLES, []), ([], SAMPLES), (SAMPLES[4:], SAMPLES[:4])]
"""What the ranks get in each of five steps: never as many micro-batches on both."""


def a_number(logprobs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A loss that only the rank with samples is asked for, and that is none."""
    return logprobs.sum().item(), {}


def scenario(folder: str) -> dict[str, Any]:
    engine = FSDPTrainEngine(model=QWEN2, lr=1e-2, max_tokens_per_micro_batch=24, rendezvous_timeout_s=60)
    engine.create_process_group()
    engine.initialize()
    rank = engine.data_parallel_rank
    result: dict[str, Any] = {"rank": rank, "world_size": engine.data_parallel_world_size}
    result["steps"] = [engine.train_batch(share[rank], "sft") for share in SHARES]
    result["eval"] = engine.eval_batch(SHARES[2][rank], "sft")
    result["forward"] = engine.forward(SHARES[1][rank])
    result["weights"] = engine.export_weights()
    engine.save(f"{folder}/checkpoint")
    result["after_save"] = [engine.train_batch(SHARES[0][rank], "sft") for _ in range(2)]
    engine.load(f"{folder}/checkpoint")
    result["after_load"] = [engine.train_batch(SHARES[0][rank], "sft") for _ in range(2)]
    result["errors"] = []
    attempts = (
        lambda: engine.train_batch([{"input_ids": "text"}] if rank else SAMPLES, "sft"),
        # Rank 0 has no sample, so only rank 1 calls the loss, which lacks a column.
        lambda: engine.train_batch(SAMPLES if rank else [], "grpo"),
        lambda: engine.train_batch(SAMPLES if rank else [], a_number),
        lambda: engine.load(f"{folder}/nowhere"),
        lambda: engine.save("/proc/nowhere/checkpoint"),
    )
    for attempt in attempts:
        try:
            attempt()
        except (ValueError, OSError, RuntimeError) as exc:
            result["errors"].append((type(exc), str(exc)))
    result["version"] = engine.get_version()
    engine.destroy()
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("two_ranks"))


@pytest.fixture(scope="module")
def ranks(folder: str) -> list[dict[str, Any]]:
    return run_ranks(scenario, 2, folder)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HELMSMAN_PLATFORM", "cpu")
    engine = FSDPTrainEngine(model=QWEN2, lr=1e-2, max_tokens_per_micro_batch=1000)
    engine.create_process_group()
    engine.initialize()
    yield engine
    engine.destroy()


def test_coordinates(ranks: list[dict[str, Any]]) -> None:
    assert [(result["rank"], result["world_size"]) for result in ranks] == [(0, 2), (1, 2)]


def test_both_ranks_report_the_same(ranks: list[dict[str, Any]]) -> None:
    for key in ("steps", "eval", "after_save", "version"):
        assert ranks[0][key] == ranks[1][key]


def test_two_ranks_give_the_losses_of_one(ranks: list[dict[str, Any]], alone: FSDPTrainEngine) -> None:
    for step in ranks[0]["steps"]:
        stats = alone.train_batch(SAMPLES, "sft")
        # Rounding grows from step to step, in the norm more than in the loss.
        assert stats.pop("grad_norm") == pytest.approx(step["grad_norm"], rel=1e-4)
        assert stats == pytest.approx({name: step[name] for name in stats}, abs=1e-5, rel=1e-5)
    assert alone.eval_batch(SAMPLES, "sft") == pytest.approx(ranks[0]["eval"], abs=1e-5)
    both = [row for result in ranks for row in result["forward"]]
    for mine, theirs in zip(alone.forward(SAMPLES), both, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_only_rank_zero_exports_and_its_weights_are_whole(ranks: list[dict[str, Any]], alone: FSDPTrainEngine) -> None:
    assert ranks[1]["weights"] is None
    expected = alone.export_weights()
    assert expected is not None
    assert {name: tensor.shape for name, tensor in ranks[0]["weights"].items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


def test_two_ranks_go_on_exactly_where_they_saved(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["after_load"] == ranks[0]["after_save"]


def test_one_rank_loads_what_two_have_saved(ranks: list[dict[str, Any]], alone: FSDPTrainEngine, folder: str) -> None:
    alone.load(str(Path(folder) / "checkpoint"))
    assert alone.get_version() == len(SHARES)
    for step in ranks[0]["after_save"]:
        assert alone.train_batch(SAMPLES, "sft") == pytest.approx(step, abs=1e-5, rel=1e-5)


def test_a_failure_of_one_rank_is_an_error_of_both(ranks: list[dict[str, Any]]) -> None:
    (kind, text), *_ = ranks[1]["errors"]
    assert kind is ValueError
    assert "'input_ids' (a str) is not numeric" in text
    (kind, text), *_ = ranks[0]["errors"]
    assert kind is RuntimeError
    assert text.startswith("preparing the batch failed on another rank")
    assert "rank 1: ValueError" in text
    assert ranks[1]["errors"][1][0] is ValueError
    assert "grpo_loss needs the column(s) logprobs, advantages" in ranks[1]["errors"][1][1]
    assert ranks[0]["errors"][1][1].startswith("the loss failed on another rank")
    assert "'a_number' returned loss_sum as a float" in ranks[1]["errors"][2][1]
    assert "'a_number' returned loss_sum as a float" in ranks[0]["errors"][2][1]
    # To begin a checkpoint is rank 0's part; each rank looks itself for one that it loads.
    assert [kind is RuntimeError for kind, _ in ranks[0]["errors"]] == [True, True, True, False, False]
    assert [kind is RuntimeError for kind, _ in ranks[1]["errors"]] == [False, False, False, False, True]
