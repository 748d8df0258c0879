"""Test that an agent of OpenAI's SDK learns to use its tool, and that no session is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman.recipes import GRPO
from tests.agents.toy_model import CHAT_TOOL, SECRETS, make_toy, question, train_toy
from tests.processes import command_of

ROOT = Path(__file__).parents[3]
CPUS = {"train_cpus": 0.5, "rollout_cpus": 0.5}
SYNCHRONOUS = {"cluster": {"scheduler": "local", **CPUS, "rollout_instances": 1}}
STALE = {
    "cluster": {
        "scheduler": "local",
        **CPUS,
        "placement": "separated",
        "rollout_instances": 2,
    },
    "rollout": {"max_new_tokens": 4, "staleness": 1},
}


class Agent:
    """An agent that looks and answers, and kills an instance in one of its sessions."""

    def __init__(self, kill_at: int) -> None:
        self._numbers, self._kill_at = itertools.count(), kill_at
        self.num_killed = self.num_ended = 0
        self._clients: dict[asyncio.AbstractEventLoop, Any] = {}

    async def run(self, task: dict[str, Any], base_url: str, api_key: str) -> float:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:  # making one takes 20 ms
            self._clients[loop] = pytest.importorskip("openai").AsyncOpenAI(api_key="none")
        client = self._clients[loop].with_options(base_url=base_url, api_key=api_key)
        messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
        reward = 0.0
        for _ in range(3):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[CHAT_TOOL]
            )
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                reward = float((message.content or "").strip() == task["answer"])
                break
            for call in message.tool_calls:
                result = {"tool_call_id": call.id, "content": task["answer"]}
                messages.append({"role": "tool", **result})
            if next(self._numbers) == self._kill_at:
                self.num_killed += kill_instance()
        self.num_ended += 1
        return reward


def kill_instance() -> int:
    for process in psutil.Process().children(recursive=True):
        if command_of(process).startswith("helmsman: rollout/0"):
            os.kill(process.pid, signal.SIGKILL)
            return 1
    return 0


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_toy(tmp_path_factory.mktemp("learner"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", [SYNCHRONOUS, STALE], ids=["synchronous", "staleness 1"])
def test_agent_learns_while_an_instance_is_killed(
    learner: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    draw = random.Random(0)
    rows = [{"prompt": question(n), "answer": draw.choice(SECRETS)} for n in range(300)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows[:48])))
    agent = Agent(kill_at=60)

    async def look_and_answer(task: dict[str, Any], base_url: str, api_key: str) -> float:
        return await agent.run(task, base_url, api_key)

    recipe = GRPO(
        learner,
        {"train": rows[48:], "held_out": str(tmp_path / "held_out.jsonl")},
        agent=look_and_answer,
        steps=8,
        prompts_per_step=8,
        samples_per_prompt=4,
        train={"lr": 2e-3},
        evaluation={"every": 8, "samples": 2, "k": [1], "greedy": False},
        checkpoints={"every": 8},
        tracking={"to": ["console"], "samples": 0},
        out=str(tmp_path / "out"),
        **{"rollout": {"max_new_tokens": 4}, **settings},
    )
    summary = recipe.train()
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    rewards = [line["eval/pass@1"] for line in lines if "eval/pass@1" in line]
    assert rewards[-1] - rewards[0] >= 0.3
    assert agent.num_killed == 1
    assert agent.num_ended >= 8 * 32
    assert summary.logprob_diff_max is not None
    if settings is SYNCHRONOUS:
        assert summary.logprob_diff_max < 1e-4


SCRIPT = """
import json, os, sys, threading
from helmsman.recipes import GRPO

folder, model, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
count, lock = 0, threading.Lock()

async def agent(task, session):
    global count
    message = await session.complete([{"role": "user", "content": task["prompt"]}])
    with lock:
        count += 1
        with open(folder + "/begun", "a") as file:
            file.write("x")
        if count == last:
            os._exit(9)
    return float(len(message["content"] or "") % 2)

rows = [{"prompt": f"where {n}"} for n in range(20)]
cluster = {"scheduler": "inline"}
GRPO(
    model, rows, agent=agent, steps=3, prompts_per_step=4, samples_per_prompt=4, cluster=cluster,
    rollout={"max_new_tokens": 4, "max_in_flight": 4}, train={"lr": 1e-4},
    evaluation={"every": 0}, checkpoints={"every": 1}, tracking={"to": ["console"], "samples": 0},
    out=folder + "/out", resume=os.path.exists(folder + "/out"),
).train()
"""


def test_restarted_run_uses_finished_sessions(tmp_path: Path) -> None:
    model = make_toy(tmp_path / "toy")

    def run(last: int) -> int:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(model), str(last)]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        begun = tmp_path / "begun"
        num_begun = len(begun.read_text())
        begun.unlink()
        assert ran.returncode == (9 if last else 0), ran.stderr
        return num_begun

    assert run(last=24) == 24  # it ends in the middle of the second step
    with contextlib.closing(sqlite3.connect(tmp_path / "out/sessions.sqlite")) as journal:
        ((num_names,),) = journal.execute("SELECT count(*) FROM sessions")
    num_kept = num_names - 16
    assert num_kept > 0
    assert run(last=0) == 32 - num_kept
    (tmp_path / "begun").touch()
    assert run(last=0) == 0
