"""Test that two ranks give the results of one for losses of pairs, critics and policies, with any
micro-batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from helmsman.api.pairs import pair_samples
from helmsman.controller._training.ranks import split_samples
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.ranks import run_ranks
from tests.engines.small_models import QWEN2, random_tokens

LENGTHS = [(5, 9), (12, 4), (3, 8), (20, 7), (6, 11)]


def sample(length: int) -> dict[str, Any]:
    noise = [token / 50 - 1.5 for token in random_tokens(length, seed=length + 1)]
    return {
        "input_ids": random_tokens(length, seed=length),
        "loss_mask": [index >= 2 or length < 4 for index in range(length)],
        "logprobs": noise,
        "ref_logprobs": [number - 0.1 for number in noise],
        "returns": noise[::-1],
        "values": noise,
        "advantages": noise[length // 2],
        "loss_weights": 1.0 + noise[0],
        "top_ids": [[token, (token + length) % 50] for token in random_tokens(length, seed=9)],
        "top_logprobs": [[-0.6, -1.5 - each % 3] for each in range(length)],
        "top_coef": 0.5,
    }


PAIRS = pair_samples([(sample(first), sample(second)) for first, second in LENGTHS])
SCATTERED = [PAIRS[index] for index in (0, 2, 4, 1, 6, 3, 8, 5, 7, 9)]
"""The preferred samples before their rivals, but not beside them."""
RUNS: list[tuple[str, str, dict[str, Any]]] = [
    ("lm", "dpo", {}),
    ("value", "reward_model", {"center_coef": 0.1}),
    ("value", "value", {"clip": 0.2}),
    ("lm", "grpo", {"kl_coef": 0.1, "entropy_coef": 0.1, "dual_clip": 3.0}),
    ("lm", "gspo", {}),
]


def scenario(budget: int, **fields: Any) -> list[list[dict[str, float]]]:
    results, engines = [], []
    for head, loss, kwargs in RUNS:
        engine = FSDPTrainEngine(
            model=QWEN2,
            head=head,
            lr=1e-2,
            max_tokens_per_micro_batch=budget,
            rendezvous_timeout_s=60,
            **fields,
        )
        engines.append(engine)
        engine.initialize()  # the first engine joins the process group
        shares = split_samples(SCATTERED, engine.data_parallel_world_size)
        mine = [SCATTERED[index] for index in shares[engine.data_parallel_rank]]
        steps = [engine.train_batch(mine, loss, kwargs)]
        # One rank has no samples.
        steps.append(
            engine.train_batch(SCATTERED if engine.data_parallel_rank == 0 else [], loss, kwargs)
        )
        results.append([*steps, engine.eval_batch(mine, loss, kwargs)])
    for engine in reversed(engines):
        engine.destroy()
    return results


@pytest.fixture(scope="module")
def alone() -> list[list[dict[str, float]]]:
    (results,) = run_ranks(scenario, 1, 1000)
    return results


def same(results: list[list[dict[str, float]]], expected: list[list[dict[str, float]]]) -> None:
    for (_, loss, _), run, reference in zip(RUNS, results, expected, strict=True):
        for step, other in zip(run, reference, strict=True):
            assert step == pytest.approx(other, abs=2e-5, rel=1e-4), loss


def test_train_batch_averages_over_pairs(alone: list[list[dict[str, float]]]) -> None:
    for (_, loss, _), (step, *_) in zip(RUNS, alone, strict=True):
        assert step.get("num_pairs") == (
            len(PAIRS) // 2 if loss in ("dpo", "reward_model") else None
        )
        assert step["num_tokens"] == sum(sum(sample["loss_mask"][1:]) for sample in PAIRS)
    assert 0 <= alone[0][0]["accuracy"] <= 1


def test_train_batch_two_ranks(alone: list[list[dict[str, float]]]) -> None:
    first, second = run_ranks(scenario, 2, 30)
    assert first == second
    same(first, alone)


def model_parallel(field: str) -> list[list[dict[str, float]]]:
    return scenario(60, **{field: 2})


@pytest.mark.parametrize("field", ["tensor_parallel_size", "context_parallel_size"])
def test_train_batch_two_model_parallel_ranks(
    field: str, alone: list[list[dict[str, float]]]
) -> None:
    first, second = run_ranks(model_parallel, 2, field)
    assert first == second
    same(first, alone)


def test_train_batch_micro_batches(alone: list[list[dict[str, float]]]) -> None:
    (results,) = run_ranks(scenario, 1, 1)
    same(results, alone)


def exits_on_rank_one(
    logprobs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if dist.get_rank() == 1:
        raise SystemExit("rank 1 exits")
    return logprobs.sum(), {}


def exit_of_one_rank() -> tuple[str, str]:
    engine = FSDPTrainEngine(model=QWEN2, lr=1e-2, rendezvous_timeout_s=60, collective_timeout_s=20)
    engine.initialize()
    try:
        engine.train_batch(PAIRS, exits_on_rank_one)
    except (RuntimeError, SystemExit) as error:
        return type(error).__name__, str(error)
    finally:
        engine.destroy()
    return "", ""


def test_train_batch_loss_exits_on_one_rank() -> None:
    first, second = run_ranks(exit_of_one_rank, 2)
    assert second == ("SystemExit", "rank 1 exits")
    assert first[0] == "RuntimeError"
    assert "the loss failed on another rank" in first[1]
    assert "rank 1: SystemExit: rank 1 exits" in first[1]
