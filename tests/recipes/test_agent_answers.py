"""Sessions of agents as answers: those that a restarted run uses again, and their rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from helmsman import SamplingParams
from helmsman.agents import AgentGateway, AgentSession
from helmsman.recipes.answers import AgentAnswers
from helmsman.recipes.prompts import Draw, Row
from helmsman.recipes.settings import Agent
from tests.agents.constant_model import constant_rollout, plain_tokenizer

ROW = Row(prompt_ids=[], prompt="", answer=None, source="", entry={})
DRAW = Draw(number=3, row=ROW, seeds=[1])


class Sessions:
    """An agent that counts its sessions, and rates each with its number."""

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


def made(gateway: AgentGateway, agent: Any, staleness: float = 0.0) -> AgentAnswers:
    return AgentAnswers(gateway, Agent(use="x"), staleness, agent.run)


@pytest.mark.asyncio
async def test_finished_session_is_used_again_after_a_restart(gateway: AgentGateway) -> None:
    agent = Sessions()
    assert await reward_at(made(gateway, agent), 8) == 1.0
    restarted = made(gateway, agent)
    assert await reward_at(restarted, 8) == 1.0
    assert await reward_at(restarted, 9) == 2.0  # the weights have changed
    assert await reward_at(made(gateway, agent, staleness=1), 10) == 2.0
    gateway.forget(["3/0"])
    assert await reward_at(made(gateway, agent), 9) == 3.0


@pytest.mark.asyncio
async def test_session_of_lost_weights_is_not_used(gateway: AgentGateway) -> None:
    agent = Sessions()
    assert await reward_at(made(gateway, agent), 8) == 1.0
    restarted = made(gateway, agent)
    restarted.set_step(6)  # the last checkpoint is that of step 5
    assert await reward_at(restarted, 8) == 2.0


@pytest.mark.asyncio
async def test_agent_that_posts_a_reward_and_fails_is_not_kept(gateway: AgentGateway) -> None:
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
