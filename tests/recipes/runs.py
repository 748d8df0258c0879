"""Runs of the GRPO recipe, and a check of their weights that does without any of Helmsman's
code."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from helmsman.recipes.command import main
from tests.recipes.processes import run_here

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "grpo_hf.py"
SMOKE = ROOT / "helmsman" / "recipes" / "configs" / "cpu_smoke.yaml"

REWARD = """
# any model gets some of it, so there is something to learn from the first step on
def digits(completion, num_tokens):
    return sum(each.isdigit() for each in completion) / max(1, num_tokens)
"""


def write_reward(folder: Path, *, on_cluster: bool = False) -> str:
    """A reward that a random model has something of; returns what ``rewards`` says of it."""
    path = folder / "digits.py"
    path.write_text(REWARD)
    return json.dumps([{"use": f"{path}:digits", "processes": 1, "on_cluster": on_cluster}])


def begin_here(model: Path, data: Path, out: Path, *flags: str) -> int:
    """Run it in this process; returns its exit code."""
    one = (
        "--cluster.scheduler",
        "inline",
        "--cluster.train_workers",
        "1",
        "--cluster.rollout_instances",
        "1",
    )
    return run_here(
        functools.partial(main, "grpo"), [*_flags(model, data, out), *one, *map(str, flags)]
    )


def _flags(model: Path, data: Path, out: Path) -> list[str]:
    return [
        "--config",
        str(SMOKE),
        "--model",
        str(model),
        "--data.train",
        str(data),
        "--out",
        str(out),
    ]


def command(model: Path, data: Path, out: Path, *flags: str) -> list[str]:
    """Of a run."""
    return [sys.executable, str(SCRIPT), *_flags(model, data, out), *flags]


def run(model: Path, data: Path, out: Path, *flags: str, limit_s: float = 300.0) -> str:
    """Run it to its end; returns what it said."""
    ran = subprocess.run(
        command(model, data, out, *flags),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        cwd=out.parent,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-6000:]
    return ran.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def require_served_weights(
    out: Path, *, num_instances: int, steps: int, tolerance: float = 1e-3
) -> float:
    """Compare what each instance answered after each step with the model of that step's checkpoint,
    as transformers reads it.

    Greedy tokens must be those of largest probability and their log-probabilities the same, and
    they must change from step to step. Returns the largest difference.
    """
    import torch
    from transformers import AutoModelForCausalLM

    checks = lines(out / "checks.jsonl")
    assert [check["step"] for check in checks] == list(range(1, steps + 1))
    apart, before = 0.0, None
    for check in checks:
        model = AutoModelForCausalLM.from_pretrained(
            out / "checkpoints" / f"step-{check['step']:06d}" / "model", dtype=torch.float32
        )
        assert len(check["answers"]) == num_instances
        for instance, answers in check["answers"].items():
            for prompt, answer, told in zip(
                check["prompts"], answers, check["logprobs"][instance], strict=True
            ):
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
                own = logits.log_softmax(-1)
                chosen = own.gather(1, torch.tensor(answer)[:, None])[:, 0]
                # Where two tokens are equally likely up to rounding, either is right.
                assert (own.max(-1).values - chosen).max() < 1e-4, (
                    check["step"],
                    instance,
                    answer,
                    own.argmax(-1).tolist(),
                )
                apart = max(apart, float((chosen - torch.tensor(told)).abs().max()))
        assert apart < tolerance, (check["step"], apart)
        now = next(iter(check["logprobs"].values()))
        assert (
            before is None or max(abs(a[0] - b[0]) for a, b in zip(now, before, strict=True)) > 1e-4
        ), check["step"]
        before = now
    return apart
