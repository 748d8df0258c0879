"""Test sessions of agents as answers: their rewards, and their reuse by a restarted run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from helmsman import SamplingParams
from helmsman.agents import AgentGateway, AgentSession
from helmsman.agents._messages import BadRequestError
from helmsman.recipes.answers import AgentAnswers, find_agent
from helmsman.recipes.prompts import Draw, Row
from helmsman.recipes.settings import Agent
from tests.agents.constant_model import Constant, constant_rollout, plain_tokenizer

ROW = Row(prompt_ids=[], prompt="", answer=None, source="", entry={})
DRAW = Draw(number=3, row=ROW, seeds=[1])


class Sessions:
    """An agent that counts its sessions and returns the count as reward."""

    def __init__(self) -> None:
        self.num = 0

    async def run(self, session: AgentSession) -> float:
        await session.complete([{"role": "user", "content": "a"}])
        self.num += 1
        return float(self.num)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[AgentGateway]:
    journal = tmp_path / "sessions.sqlite"
    with (
        constant_rollout() as rollout,
        AgentGateway(rollout, plain_tokenizer(), journal=journal) as made,
    ):
        yield made


async def reward_at(answers: AgentAnswers, step: int) -> float:
    answers.set_step(step)
    ((_, scored),) = await answers.answer(ROW, [SamplingParams()], DRAW)
    return scored.total


def made(
    gateway: AgentGateway, agent: Any, staleness: float = 0.0, first_step: int = 1
) -> AgentAnswers:
    answers = AgentAnswers(gateway, Agent(use="x"), staleness, {"x": agent.run})
    answers.begin(first_step)
    return answers


@pytest.mark.asyncio
async def test_session_reused_after_restart(gateway: AgentGateway) -> None:
    agent = Sessions()
    assert await reward_at(made(gateway, agent), 8) == 1.0
    restarted = made(gateway, agent)
    assert await reward_at(restarted, 8) == 1.0
    assert await reward_at(restarted, 9) == 2.0  # the weights have changed
    assert await reward_at(made(gateway, agent, staleness=1), 10) == 2.0
    gateway.forget(["3/0"])
    assert await reward_at(made(gateway, agent), 9) == 3.0


@pytest.mark.asyncio
async def test_session_of_lost_weights(
    gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Constant, "version", 7)
    agent = Sessions()
    answers = made(gateway, agent)
    assert await reward_at(answers, 8) == 1.0
    assert await reward_at(made(gateway, agent, first_step=8), 8) == 1.0
    # The last checkpoint is that of step 5: steps 6 and 7 run again, with other weights.
    assert await reward_at(made(gateway, agent, first_step=6), 8) == 2.0
    answers.begin(6)  # the same after a recovery within the script
    assert await reward_at(answers, 8) == 3.0


@pytest.mark.asyncio
async def test_truncated_session_of_failed_agent(gateway: AgentGateway) -> None:
    async def endless(session: AgentSession) -> None:
        while True:
            await session.complete([{"role": "user", "content": "a"}])

    limits = Agent(use="x", max_turns=2, truncated_reward=-1.0)
    answers = AgentAnswers(gateway, limits, 0.0, {"x": endless})
    assert await reward_at(answers, 1) == -1.0
    record = gateway.finished("3/0")
    assert record is not None
    assert (record.num_turns, record.is_truncated) == (2, True)
    gateway.forget(["3/0"])
    answers = AgentAnswers(gateway, Agent(use="x", max_turns=2), 0.0, {"x": endless})
    with pytest.raises(BadRequestError, match="2 of the session's 2 turns are used"):
        await reward_at(answers, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("given", "returned", "message"),
    [
        (math.nan, None, "the reward is nan; expected a finite number"),
        ("good", None, "the reward is 'good'; expected a finite number"),
        (None, math.inf, "the agent returned inf; expected its reward"),
        (None, None, "the agent returned None; expected its reward, a mapping with 'reward', or"),
    ],
)
async def test_reward_not_finite(
    gateway: AgentGateway, given: Any, returned: Any, message: str
) -> None:
    async def agent(session: AgentSession) -> Any:
        await session.complete([{"role": "user", "content": "a"}])
        if given is not None:
            session.set_turn_reward(-1, given)
        return returned

    with pytest.raises(ValueError, match=message):
        await reward_at(AgentAnswers(gateway, Agent(use="x"), 0.0, {"x": agent}), 1)


@pytest.mark.asyncio
async def test_agent_timeout(gateway: AgentGateway) -> None:
    async def agent(session: AgentSession) -> None:
        await asyncio.Event().wait()

    answers = AgentAnswers(gateway, Agent(use="x", timeout_s=0.01), 0.0, {"x": agent})
    message = r"did not end within 0.01 s \(agent.timeout_s\), after 0 turns of the model"
    with pytest.raises(TimeoutError, match=message):
        await reward_at(answers, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("returned", [True, Decimal("0.5"), np.float32(2), {"reward": np.ones(1)}])
async def test_reward_of_other_types(gateway: AgentGateway, returned: Any) -> None:
    async def agent(session: AgentSession) -> Any:
        await session.complete([{"role": "user", "content": "a"}])
        session.set_turn_reward(-1, np.bool_(True))  # type: ignore[arg-type]
        return returned

    found = await reward_at(AgentAnswers(gateway, Agent(use="x"), 0.0, {"x": agent}), 1)
    own = returned["reward"].item() if isinstance(returned, dict) else returned
    assert found == float(own) + 1.0, "with that of the turn"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("nofile.py:solve", r"the agent 'nofile.py:solve' cannot be loaded: there is no file"),
        ("nosuch.mod:solve", r"the agent 'nosuch.mod:solve': No module named 'nosuch'"),
        ("solve", r"there is no agent 'solve'; expected 'module:function' or"),
    ],
)
def test_find_agent_unknown(use: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_agent(use, {})


@pytest.mark.asyncio
async def test_agent_object_and_signature(gateway: AgentGateway) -> None:
    class Callable:
        async def __call__(self, session: AgentSession) -> float:
            await session.complete([{"role": "user", "content": "a"}])
            return 0.5

    assert await reward_at(AgentAnswers(gateway, Agent(use="x"), 0.0, {"x": Callable()}), 1) == 0.5
    with pytest.raises(ValueError, match="has the parameter 'question'; expected some of task"):
        AgentAnswers(gateway, Agent(use="x"), 0.0, {"x": lambda question: question})


@pytest.mark.asyncio
async def test_session_of_failed_agent_with_posted_reward(gateway: AgentGateway) -> None:
    class Failing(Sessions):
        async def run(self, session: AgentSession) -> float:
            reward = await super().run(session)
            url = session.base_url.removesuffix("/v1") + "/finish"
            headers = {"x-api-key": session.key}
            async with (
                aiohttp.ClientSession() as client,
                client.post(url, json={"reward": 9}, headers=headers) as response,
            ):
                assert response.status == 200
            if self.num == 1:
                raise ZeroDivisionError
            return reward

    answers = made(gateway, Failing())
    with pytest.raises(ZeroDivisionError):
        await reward_at(answers, 1)
    assert gateway.finished("3/0") is None
    assert await reward_at(answers, 1) == 2.0
    record = gateway.finished("3/0")
    assert record is not None
    assert record.reward == 2.0
