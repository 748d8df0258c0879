"""Test that PPO and DPO learn on workers of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes import DPO, PPO
from tests.recipes.runs import lines

pytestmark = pytest.mark.timeout(250)


def digits_of(completion: str) -> float:
    return sum(map(str.isdigit, completion)) / max(1, len(completion))


def test_ppo_critic_learns_and_resumes(model: Path, tmp_path: Path) -> None:
    def run(steps: int, **settings: Any) -> list[dict[str, Any]]:
        PPO(
            model,
            [f"{number}+1=" for number in range(8)],
            [digits_of],
            steps=steps,
            prompts_per_step=8,
            rollout={"max_new_tokens": 6},
            critic={"lr": 1e-2},
            cluster={"scheduler": "local"},
            checkpoints={"every": 2},
            out=str(tmp_path / "out"),
            **settings,
        ).train()
        return lines(tmp_path / "out" / "metrics.jsonl")

    found = run(4)
    assert found[-1]["critic/loss"] < found[1]["critic/loss"]
    assert "advantages" not in found[-1]
    assert (tmp_path / "out" / "checkpoints" / "latest" / "critic").exists()
    found = run(5, resume=True)
    assert [row["step"] for row in found] == list(range(6))
    assert found[-1]["critic/loss"] < found[1]["critic/loss"], "it continues from the checkpoint"


def test_dpo_prefers_chosen(model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{number}+0=", "chosen": f"{number}", "rejected": "x"} for number in range(10)
    ]
    summary = DPO(
        model,
        {"train": rows, "num_held_out": 2},
        steps=6,
        batch_size=4,
        evaluate_every=6,
        train={"lr": 1e-2},
        cluster={"scheduler": "local"},
        out=str(tmp_path / "out"),
    ).train()
    found = lines(tmp_path / "out" / "metrics.jsonl")
    assert found[0]["eval/reward_margin"] == pytest.approx(0.0, abs=1e-4), "the reference"
    assert found[-1]["eval/accuracy"] == 1.0
    assert found[-1]["reward_margin"] > found[1]["reward_margin"]
    assert summary.loss_last is not None
