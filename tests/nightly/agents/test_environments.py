"""Test the connectors to OpenEnv and verifiers by real episodes with these packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman import HelmsmanError
from helmsman.agents import AgentGateway, SessionLimits, play
from helmsman.agents.environments import run_verifiers

OPENENV_SERVER = """
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    text: str

class Question(Observation):
    text: str

class Guessing(Environment):
    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self._state = State(step_count=0)
        return Question(text="where 0")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        step = self._state.step_count
        return Question(text=f"where {step}", reward=0.5 * step, done=step == 3)

    @property
    def state(self):
        return self._state

sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
app = create_fastapi_app(Guessing, Guess, Question)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])
"""


@pytest.fixture
def openenv_url() -> Iterator[str]:
    pytest.importorskip("openenv.core")
    program = [sys.executable, "-c", OPENENV_SERVER]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.mark.asyncio
async def test_openenv(gateway: AgentGateway, openenv_url: str) -> None:
    core = pytest.importorskip("openenv.core")
    async with core.GenericEnvClient(base_url=openenv_url) as environment:
        with gateway.session() as session:
            await play(
                environment,
                session,
                action=lambda message: {"text": message["content"] or ""},
                observation=lambda seen: str(seen["text"]),
            )
            (sample,) = session.samples()
    assert session.record().reward == 3.0
    assert sample.turn_rewards == [0.5, 1.0, 1.5]


TASKSET = """
import sys
from collections.abc import Iterable

import verifiers.v1 as vf

PROGRAM = '''
import json, sys, urllib.request

url, key, prompt, num_turns = sys.argv[1:]
chat = [{"role": "user", "content": prompt}]
for _ in range(int(num_turns)):
    request = urllib.request.Request(
        url + "/chat/completions",
        json.dumps({"model": "policy", "messages": chat}).encode(),
        {"Authorization": "Bearer " + key, "Content-Type": "application/json"},
    )
    chat.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    chat.append({"role": "user", "content": prompt})
'''

class TwoTurns(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *_, **__):
        turns = data.description or "2"
        program = [sys.executable, "-c", PROGRAM, endpoint, secret, data.prompt, turns]
        return await runtime.run_program(program, {})

class Where(vf.Task):
    @vf.reward(weight=0.5)
    async def answered(self, trace) -> float:
        return float(trace.num_turns)

class Questions(vf.Taskset[Where, vf.TasksetConfig]):
    def load(self) -> Iterable[Where]:
        for turns in ("2", "9"):
            yield Where(vf.TaskData(prompt="where 3", description=turns), self.config.task)

__all__ = ["Questions", "TwoTurns"]
"""


@pytest.mark.asyncio
async def test_verifiers(
    gateway: AgentGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the package keeps its working folders there
    vf: Any = pytest.importorskip("verifiers.v1")
    (tmp_path / "where_questions.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = vf.SingleAgentEnv(
        vf.SingleAgentEnvConfig(
            taskset={"id": "where-questions"},
            agent=vf.AgentConfig(runtime=vf.SubprocessConfig()),
        )
    )
    short, long = environment.taskset
    async with environment.serving():
        with gateway.session() as session:
            reward = await run_verifiers(environment, short, session)
        (sample,) = session.samples()
        with (
            gateway.session(limits=SessionLimits(max_turns=2)) as limited,
            pytest.raises(HelmsmanError, match="verifiers episode failed"),
        ):
            await run_verifiers(environment, long, limited)
    assert reward == 0.5 * 2
    assert len(sample.turn_ends) == 2
    assert limited.is_truncated
    assert not [name for name in os.environ if name.startswith("HELMSMAN_API_KEY_")]
