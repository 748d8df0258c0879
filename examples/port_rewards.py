"""Reward functions and rows of verl and OpenRLHF, unchanged in a GRPO run.

    python examples/port_rewards.py

The script creates a tiny model, which learns to begin its answers with the right digit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from helmsman.recipes import GRPO, make_model

# A row in the form that verl's preprocessing scripts write to parquet.
ROWS = [
    {
        "data_source": "digits",
        "prompt": [{"role": "user", "content": f"{digit}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(digit % 2)},
        "extra_info": {"index": digit},
    }
    for digit in range(10)
]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """A reward for verl (``custom_reward_function.path``), called for one answer."""
    assert data_source == "digits" and extra_info["index"] % 2 == int(ground_truth)
    return float(solution_str.strip().startswith(ground_truth))


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> Any:
    """A reward for OpenRLHF (``--remote_rm_url``), called for all answers to a prompt."""
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    digits = [sum(map(str.isdigit, answer)) / max(1, len(answer)) for answer in answers]
    return {"rewards": torch.tensor(digits), "scores": torch.tensor(digits)}


if __name__ == "__main__":
    GRPO(
        model=make_model(Path("runs/port_rewards"), num_layers=2, width=64),
        data=ROWS,
        rewards=[compute_score, reward_func],
        steps=12,
        prompts_per_step=8,
        train={"lr": 3e-3},
        rollout={"max_new_tokens": 8},
        overwrite=True,
    ).train()
