"""Test further layouts of parallel training, on one to four ranks, against one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.ranks import run_ranks
from tests.engines.train.layouts import (
    BOTH,
    CONTEXT,
    TENSOR,
    Case,
    require_equal,
    run_alone,
    run_cases,
)

pytestmark = pytest.mark.timeout(600)

CASES = [
    Case(1, "qwen2", {"gradient_checkpointing": True}),
    Case(2, "qwen2", {**TENSOR, "packing": False}),
    Case(2, "qwen3", {**CONTEXT, "packing": False}),
    Case(4, "qwen3", {**TENSOR, "data_parallel_replicas": 2}),
    Case(4, "gemma3", BOTH),
    Case(4, "llama", {"context_parallel_size": 4}),  # more than there are heads of keys and values
]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return run_alone({case.model for case in CASES})


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_train_batch_equals_one_rank(num_ranks: int, alone: dict[str, dict[str, Any]]) -> None:
    cases = [case for case in CASES if case.num_ranks == num_ranks]
    ranks = run_ranks(run_cases, num_ranks, cases)
    for number, case in enumerate(cases):
        require_equal(case, [rank[number] for rank in ranks], alone[case.model])
