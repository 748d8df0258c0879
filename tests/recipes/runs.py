"""Starts runs of the GRPO recipe, and checks their weights without Helmsman's code."""

from __future__ import annotations

import functools
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helmsman.recipes.command import main
from tests.recipes.processes import run_here

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "helmsman" / "recipes" / "configs" / "cpu_smoke.yaml"
PROGRAM = [sys.executable, "-m", "helmsman", "grpo", "--config", str(SMOKE)]

PLAIN = shlex.split("--evaluation.every 0 --train.lr 1e-3")
ONE_OF_EACH = shlex.split("--cluster.train_workers 1 --cluster.rollout_instances 1")
TWO_STEPS = shlex.split(
    "--steps 2 --prompts_per_step 2 --samples_per_prompt 2 --rollout.max_new_tokens 4"
)
REWARD = """
# any model gets some of it, so there is something to learn from the first step on
def digits(completion, num_tokens):
    return sum(each.isdigit() for each in completion) / max(1, num_tokens)
"""


def write_reward(folder: Path, *, on_cluster: bool = False) -> str:
    """Write a reward that a random model gets a part of; returns the value of ``--rewards``."""
    path = folder / "digits.py"
    path.write_text(REWARD)
    return json.dumps([{"use": f"{path}:digits", "processes": 1, "on_cluster": on_cluster}])


class Runs:
    """Runs of the recipe on one model and data, each in a subfolder.

    Attributes:
        model: The folder of the model.
        data: The file of prompts.
        folder: Where the output folders are.
    """

    def __init__(self, model: Path, data: Path, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder

    def here(self, name: str, *flags: str) -> int:
        """Run in this process, on the inline scheduler; returns the exit code."""
        import torch

        given = ["--config", str(SMOKE), *_flags(self.model, self.data, self.folder / name), *PLAIN]
        given += ["--rewards", write_reward(self.folder, on_cluster=True)]
        given += ["--cluster.scheduler", "inline", *ONE_OF_EACH]
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return run_here(functools.partial(main, "grpo"), [*given, *flags])
        finally:
            torch.set_num_threads(num_threads)

    def start(
        self, name: str, *flags: str, program: Sequence[str] = PROGRAM, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a run on the local scheduler in a process of its own."""
        given = ["--rewards", write_reward(self.folder), *PLAIN]
        given += ["--cluster.scheduler", "local", *ONE_OF_EACH]
        return subprocess.Popen(
            [*program, *_flags(self.model, self.data, self.folder / name), *given, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The recorded steps of a run."""
        return lines(self.folder / name / "metrics.jsonl")


def _flags(model: Path, data: Path, out: Path) -> list[str]:
    return ["--model", str(model), "--data.train", str(data), "--out", str(out)]


def run(model: Path, data: Path, out: Path, *flags: str, limit_s: float = 300.0) -> str:
    """Run the recipe to its end; returns its output."""
    ran = subprocess.run(
        [*PROGRAM, *_flags(model, data, out), *flags],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        cwd=out.parent,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-6000:]
    return ran.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def require_served_weights(
    out: Path, *, num_instances: int, steps: int, tolerance: float = 1e-3
) -> float:
    """Compare the greedy answers of each instance with the checkpoint of the same step.

    Tokens must be those of largest probability according to transformers, with the same
    log-probabilities, which must change from step to step. Returns the largest difference.
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
            for prompt, answer, logprobs in zip(
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
                apart = max(apart, float((chosen - torch.tensor(logprobs)).abs().max()))
        assert apart < tolerance, (check["step"], apart)
        now = next(iter(check["logprobs"].values()))
        assert (
            before is None or max(abs(a[0] - b[0]) for a, b in zip(now, before, strict=True)) > 1e-4
        ), check["step"]
        before = now
    return apart
