"""Connectors to environments: each plays a real episode with the package it connects to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponseError, web

from helmsman import HelmsmanError
from helmsman.agents import AgentGateway, SessionLimits, play, run_task_folder
from helmsman.agents.environments import run_nemo_gym, run_verifiers
from tests.agents.toy_model import SECRETS, question

# --- reset and step -------------------------------------------------------------------------------


class Gymnasium:
    """An environment in Gymnasium's form."""

    def reset(self) -> tuple[str, dict[str, str]]:
        self.steps = 0
        return question(0), {}

    def step(self, _: str) -> tuple[str, float, bool, bool, dict[str, str]]:
        self.steps += 1
        return question(self.steps), 0.5 * self.steps, False, self.steps == 3, {}


@pytest.mark.asyncio
async def test_gymnasium(gateway: AgentGateway) -> None:
    with gateway.session() as session:
        await play(Gymnasium(), session, action=lambda m: m["content"] or "")
        (sample,) = session.samples()
    assert session.record().reward == 3.0
    assert sample.turn_rewards == [0.5, 1.0, 1.5]
    assert sample.returns(0.5) == [0.5 + 0.5 * (1.0 + 0.5 * 1.5), 1.0 + 0.5 * 1.5, 1.5]
    spread = sample.per_token([1.0, 2.0, 3.0])
    assert len(spread) == len(sample.input_ids)
    assert spread[sample.turn_ends[0]] == 2.0


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


@pytest.mark.slow
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


# --- verifiers ------------------------------------------------------------------------------------

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


@pytest.mark.slow
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


# --- NeMo Gym -------------------------------------------------------------------------------------

LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look for something.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    "strict": True,
}


class ResourcesServer:
    """Follows the protocol of NeMo Gym's resources servers; its reward is 1 for the secret."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}
        self.num_calls = 0

    async def seed_session(self, request: web.Request) -> web.Response:
        episode = str(len(self.secrets))
        self.secrets[episode] = (await request.json())["secret"]
        response = web.json_response({})
        response.set_cookie("session", episode)
        return response

    async def look(self, request: web.Request) -> web.Response:
        self.num_calls += 1
        secret = self.secrets[request.cookies["session"]]
        return web.Response(text=secret if (await request.json())["key"] == "a" else "nothing")

    async def verify(self, request: web.Request) -> web.Response:
        from openai.types.responses import Response  # takes a second

        body = await request.json()
        assert body["secret"] == self.secrets[request.cookies["session"]]
        assert "input" in body["responses_create_params"]
        output = body["response"]["output"]
        own = [each for each in output if each["type"] != "function_call_output"]
        response = Response.model_validate({**body["response"], "output": own})
        calls = {each.call_id for each in response.output if each.type == "function_call"}
        results = {each["call_id"] for each in output if each["type"] == "function_call_output"}
        assert calls == results
        reward = float(body["secret"] in response.output_text)
        return web.json_response({**body, "reward": reward})


@contextlib.asynccontextmanager
async def serve(server: ResourcesServer) -> AsyncIterator[str]:
    app = web.Application()
    for handler in (server.seed_session, server.look, server.verify):
        app.router.add_post(f"/{handler.__name__}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.asyncio
async def test_nemo_gym(gateway: AgentGateway) -> None:
    server, rewards = ResourcesServer(), []
    async with serve(server) as url:

        async def episode(number: int) -> None:
            prompt: Any = question(number)
            if number % 2:
                prompt = [{"role": "user", "content": prompt}]
            params = {"input": prompt, "tools": [LOOK], "max_output_tokens": 8}
            row = {"responses_create_params": params, "secret": SECRETS[number % 4]}
            with gateway.session(seed=number) as session:
                rewards.append(await run_nemo_gym(url, row, session, max_turns=4))
            (sample,) = session.samples()
            assert len(sample.turn_ends) == session.num_turns

        await asyncio.gather(*map(episode, range(16)))
        assert server.num_calls > 0
        assert set(rewards) == {0.0, 1.0}
        with gateway.session(limits=SessionLimits(max_tokens=0)) as session:
            row = {"responses_create_params": {"input": question(0)}, "secret": "north"}
            with pytest.raises(ClientResponseError, match="400"):
                await run_nemo_gym(url, row, session)


# --- folders with tasks ---------------------------------------------------------------------------

AGENT = """
import json, os, urllib.request

def post(url, body, key):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"x-api-key": key})
    return json.load(urllib.request.urlopen(request))

url, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_API_KEY"]
chat = [{"role": "user", "content": os.environ["HELMSMAN_TASK"]}]
answer = post(url + "/v1/messages", {"max_tokens": 4, "messages": chat}, key)
open("answer.txt", "w").write(str(answer["content"]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "environment").mkdir()
    (tmp_path / "instruction.md").write_text(question(2))
    return tmp_path


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ("test -s answer.txt && grep -q type answer.txt", 1.0),
        ("exit 1", 0.0),
        ("echo 0.25 > $HELMSMAN_LOGS/reward.txt", 0.25),
        ("""echo '{"reward": 0.5}' > $HELMSMAN_LOGS/reward.json""", 0.5),
    ],
)
async def test_task_folder(gateway: AgentGateway, folder: Path, test: str, reward: float) -> None:
    (folder / "tests" / "test.sh").write_text(test)
    with gateway.session() as session:
        found = await run_task_folder(folder, [sys.executable, "-c", AGENT], session)
    assert found == reward
    assert session.num_turns == 1
    assert not list((folder / "environment").iterdir())


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("section", "program", "test"),
    [("agent", "sleep 3600", "true"), ("verifier", "true", "sleep 3600")],
)
async def test_timeouts_of_a_task_folder(
    gateway: AgentGateway, folder: Path, section: str, program: str, test: str
) -> None:
    (folder / "tests" / "test.sh").write_text(test)
    (folder / "task.toml").write_text(f"[{section}]\ntimeout_sec = 0.5\n")
    with gateway.session() as session, pytest.raises(TimeoutError):
        await run_task_folder(folder, program, session)
