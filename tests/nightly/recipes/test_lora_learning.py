"""Test that adapters learn what all parameters learn, with a small part of them."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helmsman.recipes.command import main
from helmsman.recipes.demo import write_inputs
from tests.recipes.runs import lines

pytestmark = pytest.mark.timeout(1200)


def accuracies(inputs: Path, out: Path, *flags: str) -> list[float]:
    """Train for 60 steps; return the shares of right answers to held-out puzzles, every 10."""
    files = ["--data.train", str(inputs / "train.jsonl"), "--data.held_out"]
    files += [str(inputs / "held_out.jsonl"), "--model", str(inputs / "sft" / "model")]
    shape = ["--config", "demo", "--cluster.scheduler", "inline", "--steps", "60"]
    assert main("grpo", [*shape, *files, "--out", str(out), *flags]) == 0
    rows = lines(out / "metrics.jsonl")
    return [row["eval/greedy_accuracy"] for row in rows if "eval/greedy_accuracy" in row]


def gain_of(shares: list[float]) -> float:
    return statistics.fmean(shares[-3:]) - shares[0]


def num_parameters(path: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(path).values())


def test_adapters_learn_as_much(tmp_path: Path) -> None:
    write_inputs(tmp_path, width=128)
    whole = accuracies(tmp_path, tmp_path / "whole", "--train.lr", "3e-4")
    lora = ["--train.engine.lora.rank", "3", "--train.engine.lora.alpha", "24"]
    lora += ["--train.engine.lora.targets", "all-linear", "--train.lr", "2e-3"]
    low = accuracies(tmp_path, tmp_path / "lora", *lora)
    assert low[0] == whole[0]
    gain, gain_of_all = gain_of(low), gain_of(whole)
    assert gain_of_all > 0.1
    assert gain >= 0.9 * gain_of_all
    trained = num_parameters(tmp_path / "lora" / "adapter" / "adapter_model.safetensors")
    assert trained < 0.05 * num_parameters(tmp_path / "whole" / "model" / "model.safetensors")
