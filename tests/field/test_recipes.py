"""Reports about training runs: failed rewards, and runs that are resumed."""

from __future__ import annotations

import json
import os
import statistics
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes import DPO, GRPO, SFT
from tests.cases.conftest import model
from tests.cases.conftest import one_thread as one_torch_thread

__all__ = ["model", "one_torch_thread"]
pytestmark = pytest.mark.usefixtures("one_torch_thread")

ROWS = [{"prompt": f"{number}=", "number": number} for number in range(10)]


# --- NeMo-RL #3589 --------------------------------------------------------------------------------


def digits(completion: str) -> float:
    """Return the share of digits."""
    return sum(map(str.isdigit, completion)) / max(1, len(completion))


def is_fatal(completion: str) -> bool:
    return zlib.crc32(completion.encode()) % 10 == 0


def digits_or_end(completion: str) -> float:
    """Return the share of digits; some answers end the process instead."""
    if is_fatal(completion):
        os._exit(7)
    return digits(completion)


Groups = dict[tuple[int, ...], list[tuple[tuple[int, ...], float]]]


def advantages(model: str, out: Path, reward: Callable[..., float]) -> Groups:
    """Train for a step; returns the answers to each prompt with their advantages."""
    path = out.with_suffix(".jsonl")
    GRPO(
        model,
        ROWS,
        {"use": reward, "processes": 2},
        cluster={"scheduler": "inline"},
        rollout={"max_new_tokens": 6},
        algorithm={
            "preset": "dr_grpo",
            "loss": "tests.field.losses.recorded",
            "loss_args": {"path": str(path)},
        },
        evaluation={"every": 0},
        checkpoints={"export": "none"},
        steps=1,
        prompts_per_step=10,
        samples_per_prompt=4,
        seed=1,
        out=str(out),
    ).train()
    found: Groups = {}
    for line in path.read_text().splitlines():
        ids, mask, value = json.loads(line)
        first = mask.index(1)
        answer = tuple(ids[first : first + sum(mask)])
        found.setdefault(tuple(ids[:first]), []).append((answer, value))
    return found


def test_advantages_beside_killed_rewards(model: str, tmp_path: Path) -> None:
    """NeMo-RL #3589, NeMo Gym #1351, open-instruct #1887: failures are trained as reward 0.

    A tenth of the answers end their reward's process. They are left out, and the others are
    compared among themselves.
    """
    healthy = advantages(model, tmp_path / "healthy", digits)
    failing = advantages(model, tmp_path / "failing", digits_or_end)
    summary = json.loads((tmp_path / "failing" / "metrics.jsonl").read_text().splitlines()[-1])
    num_left_out = sum(map(len, healthy.values())) - sum(map(len, failing.values()))
    assert 0 < num_left_out <= summary["reward/failed"] <= 4
    for prompt, answers in failing.items():
        before = dict(healthy[prompt])
        differences = [value - before[answer] for answer, value in answers]
        assert max(differences) == pytest.approx(min(differences), abs=1e-6)
        if len(answers) == len(healthy[prompt]):
            assert differences == pytest.approx([0.0] * len(answers), abs=1e-6)
        assert statistics.fmean(value for _, value in answers) == pytest.approx(0.0, abs=1e-6)


# --- prime-rl #3164 -------------------------------------------------------------------------------

DRAWN: list[str] = []


def recorded(prompt: str, completion: str) -> float:
    """Record the prompt; return the share of digits."""
    DRAWN.append(prompt)
    return digits(completion)


def resumed_run(recipe: str, model: str, out: Path, cuts: Sequence[int]) -> tuple[Any, ...]:
    """Train up to each of these steps, the later ones resumed; returns draws and losses."""
    settings: dict[str, Any] = {
        "cluster": {"scheduler": "inline"},
        "checkpoints": {"every": 1, "export": "none"},
        "train": {"lr": 1e-3},
        "out": str(out),
    }
    DRAWN.clear()
    for number, steps in enumerate(cuts):
        settings |= {"steps": steps, "resume": number > 0}
        if recipe == "grpo":
            settings |= {"prompts_per_step": 4, "samples_per_prompt": 2, "evaluation": {"every": 0}}
            settings |= {"rollout": {"max_new_tokens": 3}}
            GRPO(model, ROWS, {"use": recorded, "on_cluster": True}, **settings).train()
            continue
        rows: list[dict[str, Any]] = [
            {"prompt": f"{row}=", "answer": str(row), "chosen": str(row), "rejected": "x"}
            for row in range(10)
        ]
        kind: Any = SFT if recipe == "sft" else DPO
        kind(model, rows, batch_size=4, evaluate_every=0, **settings).train()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    recorded_steps, losses = zip(
        *((line["step"], line["loss"]) for line in lines if line["step"]), strict=True
    )
    assert recorded_steps == tuple(range(1, cuts[-1] + 1))
    return (sorted(DRAWN), *losses)


def check_draws(recipe: str, model: str, folder: Path, num_cuts: int) -> None:
    """A run that is cut after each step draws what an uncut run draws, step by step."""
    drawn, *losses = resumed_run(recipe, model, folder / "whole", [num_cuts])
    again, *found = resumed_run(recipe, model, folder / "cut", range(1, num_cuts + 1))
    assert again == drawn
    assert found == pytest.approx(losses, abs=1e-4)
    assert len({round(each, 4) for each in losses}) > 1 or recipe == "grpo"


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_draws_of_a_run_that_is_cut(recipe: str, model: str, tmp_path: Path) -> None:
    """prime-rl #3164 and #3332, open-instruct #1523: data is repeated after a resume.

    tests/nightly/field/test_resume.py cuts runs ten times, those of GRPO, too.
    """
    check_draws(recipe, model, tmp_path, 3)
