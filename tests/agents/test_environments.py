"""Test the connectors to environments by real episodes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponseError, web

from helmsman.agents import AgentGateway, SessionLimits, play, run_task_folder
from helmsman.agents.environments import run_nemo_gym
from tests.agents.programs import AGENT
from tests.agents.toy_model import SECRETS, TOOL, question

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
async def test_play_gymnasium(gateway: AgentGateway) -> None:
    with gateway.session() as session:
        await play(Gymnasium(), session, action=lambda m: m["content"] or "")
        (sample,) = session.samples()
    assert session.record().reward == 3.0
    assert sample.turn_rewards == [0.5, 1.0, 1.5]
    assert sample.returns(0.5) == [0.5 + 0.5 * (1.0 + 0.5 * 1.5), 1.0 + 0.5 * 1.5, 1.5]
    spread = sample.per_token([1.0, 2.0, 3.0])
    assert len(spread) == len(sample.input_ids)
    assert spread[sample.turn_ends[0]] == 2.0


# --- NeMo Gym -------------------------------------------------------------------------------------

LOOK = {"type": "function", **TOOL, "strict": True}


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
async def test_run_nemo_gym(gateway: AgentGateway) -> None:
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
async def test_run_task_folder(
    gateway: AgentGateway, folder: Path, test: str, reward: float
) -> None:
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
async def test_run_task_folder_timeout(
    gateway: AgentGateway, folder: Path, section: str, program: str, test: str
) -> None:
    (folder / "tests" / "test.sh").write_text(test)
    (folder / "task.toml").write_text(f"[{section}]\ntimeout_sec = 0.5\n")
    with gateway.session() as session, pytest.raises(TimeoutError):
        await run_task_folder(folder, program, session)
