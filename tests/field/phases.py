"""Runs that are killed in one of the phases of a step, and resumed."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import zygote
from tests.contract.helpers import ROOT

STEPS = 4
FLAGS = shlex.split(
    f"--steps {STEPS} --checkpoints.every 1 --checkpoints.export none --prompts_per_step 2 "
    "--samples_per_prompt 2 --rollout.max_new_tokens 4 --train.lr 1e-3 --evaluation.every 2 "
    "--evaluation.max_new_tokens 4 --tracking.to [] --data.num_held_out 2 "
    "--cluster.train_cpus 0.5 --cluster.rollout_cpus 0.5"
)
_REWARD = json.dumps([{"use": "tests.field.phases:digits", "on_cluster": True, "processes": 1}])
_REWARDS = ["--rewards", _REWARD]
_INLINE = shlex.split("--cluster.scheduler inline")
VARIANTS: dict[str, list[str]] = {
    "plain": [*_REWARDS, *_INLINE],
    "asynchronous": [*_REWARDS, *_INLINE, "--rollout.staleness", "1"],
    "agents": ["--agent.use", "tests.field.phases:talk", *_INLINE],
    "background": [*_REWARDS, *_INLINE, "--checkpoints.in_background", "true"],
    "colocated": [
        *_REWARDS,
        *shlex.split(
            "--cluster.scheduler local --cluster.placement colocated --cluster.devices_per_node 1 "
            "--cluster.env_vars.HELMSMAN_PLATFORM cpu --cluster.train_workers 1 "
            "--cluster.rollout_instances 1"
        ),
    ],
}


def digits(completion: str, num_tokens: int) -> float:
    """Return the share of digits."""
    return sum(map(str.isdigit, completion)) / max(1, num_tokens)


async def talk(base_url: str, api_key: str) -> float:
    """Ask the model once, as an agent does."""
    import aiohttp

    body = {"messages": [{"role": "user", "content": "1"}]}
    async with (
        aiohttp.ClientSession(headers={"x-api-key": api_key}) as client,
        client.post(f"{base_url}/chat/completions", json=body) as response,
    ):
        answer = (await response.json())["choices"][0]["message"]["content"] or ""
    return digits(answer, len(answer))


class KilledRuns:
    """Runs of one variant on a model and data.

    Args:
        variant: Key of VARIANTS.
        model: Folder of the model.
        data: File of prompts.
        folder: Where the output folders are.
    """

    def __init__(self, variant: str, model: Path, data: Path, folder: Path) -> None:
        self.variant, self.model, self.data, self.folder = variant, model, data, folder

    def run(self, name: str, call: int, *more: str) -> tuple[int, str]:
        """Run, or resume a run; returns the exit code and the output."""
        command = [
            *(sys.executable, "-m", "tests.field.killed_run", str(call), "grpo"),
            *("--model", str(self.model), "--data.train", str(self.data)),
            *("--out", str(self.folder / name), *FLAGS, *VARIANTS[self.variant], *more),
        ]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        environ["CUDA_VISIBLE_DEVICES"] = "0" if self.variant == "colocated" else ""
        done = zygote.run(command, timeout=200.0, env=environ, preload=PRELOAD)
        return done.returncode, done.stdout + done.stderr

    def num_calls(self) -> int:
        """Return the number of calls of an unbroken run after its first step."""
        code, printed = self.run("whole", 0)
        assert code == 0, printed
        calls = int(re.findall(r"^calls (\d+)", printed, re.MULTILINE)[0])
        assert calls, "no step was recognised"
        return calls

    def check(self, name: str, call: int) -> None:
        """Kill a run at a call, and require that the resumed one makes all steps."""
        code, printed = self.run(name, call)
        assert code == -9, printed
        code, printed = self.run(name, 0, "--resume")
        assert code == 0, printed
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(STEPS + 1))


def phases(num_calls: int, numbers: Sequence[int], num_phases: int) -> list[int]:
    """Return the calls in the middle of these phases."""
    return [1 + int(num_calls * (number + 0.5) / num_phases) for number in numbers]


PRELOAD = ("torch", "transformers", "helmsman.engines.train", "helmsman.engines.rollout")
