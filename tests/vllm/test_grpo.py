"""the GRPO recipe with real vLLM: 10 steps of two FSDP2 ranks through Ray, the weights in vLLM
compared at each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helmsman.recipes.tiny_model import make_model
from tests.recipes.runs import lines, require_served_weights, run, write_reward
from tests.unit.recipes.data import write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_grpo_hf_changes_vllm_weights(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), write_jsonl(tmp_path / "sums.jsonl")
    math = {"use": "math", "weight": 0.5, "processes": 1}
    rewards = json.dumps([*json.loads(write_reward(tmp_path)), math])
    out = tmp_path / "out"
    run(
        *(model, data, out, "--check-weights", "--rewards", rewards, "--train.lr", "1e-3"),
        *(
            "--rollout.engine",
            "vllm",
            "--rollout.engine_args",
            '{"enforce_eager": true}',
            "--cluster.rollout_instances",
            "1",
        ),
        *("--cluster.env_vars", '{"VLLM_CPU_KVCACHE_SPACE": "1"}'),
        *(
            "--checkpoints.every",
            "1",
            "--checkpoints.keep",
            "11",
            "--checkpoints.export",
            "all",
            "--tracking.to",
            '["console", "tensorboard"]',
        ),
        limit_s=500,
    )
    apart = require_served_weights(out, num_instances=1, steps=10)
    metrics = lines(out / "metrics.jsonl")
    assert [each["step"] for each in metrics] == list(range(11))
    assert max(each["logprob_diff/max"] for each in metrics[1:]) < 1e-3
    assert all(each["check/max_diff"] < 1e-3 for each in metrics[1:])
    assert all("reward/math/mean" in each for each in metrics[1:])
    assert metrics[-1]["reward/digits/mean"] > metrics[1]["reward/digits/mean"], (
        "it learns to write digits"
    )
    print(
        f"vLLM and trainer: at most {max(each['logprob_diff/max'] for each in metrics[1:]):.1e} "
        "apart on what was trained on, "
        f"{sum(each['logprob_diff/mean'] for each in metrics[1:]) / 10:.1e} in the mean; vLLM and "
        f"transformers {apart:.1e}"
    )
