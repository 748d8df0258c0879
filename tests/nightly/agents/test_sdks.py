"""Test that the SDKs of vendors and a coding agent work with the gateway, unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman import Job, RolloutController, SamplingParams, Scheduler, SchedulingSpec
from helmsman.agents import AgentGateway
from tests.agents.conftest import HF
from tests.agents.sdk_sessions import AGENTS, Agent, check_coding_agent, check_sdk
from tests.agents.toy_model import BASH, make_toy


@pytest.mark.asyncio
@pytest.mark.parametrize("agent", AGENTS)
async def test_sessions_of_an_sdk(gateway: AgentGateway, agent: Agent) -> None:
    await check_sdk(gateway, agent)


@pytest.mark.timeout(900)
@pytest.mark.asyncio
async def test_sessions_of_a_coding_agent(scheduler: Scheduler, tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", dict.fromkeys(BASH, 0.5))
    job = Job(role="coder", tasks=[SchedulingSpec(cpu=0.5)])
    with (
        RolloutController(scheduler, HF, job, (), {"model": str(toy)}) as rollout,
        AgentGateway(rollout, toy, sampling=SamplingParams(max_new_tokens=8)) as gateway,
    ):
        await check_coding_agent(gateway, tmp_path)
