"""Run the tests of SDKs and agents with vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman import Job, LocalScheduler, RolloutController, SamplingParams, SchedulingSpec
from helmsman.agents import AgentGateway
from tests.agents.sdk_sessions import AGENTS, Agent, check_coding_agent, check_sdk
from tests.agents.toy_model import train_toy
from tests.vllm.vllm_models import ENGINE, SPEC_ENV

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentGateway]:
    toy = train_toy(tmp_path_factory.mktemp("toy"), with_bash=True)
    job = Job(role="rollout", tasks=[SchedulingSpec(cpu=1, env_vars=SPEC_ENV)])
    engine = {"model": str(toy), **ENGINE, "max_model_len": 8192}
    with (
        LocalScheduler() as scheduler,
        RolloutController(
            scheduler, "helmsman.engines.vllm_engine.VLLMEngine", job, (), engine
        ) as rollout,
        AgentGateway(rollout, toy, sampling=SamplingParams(max_new_tokens=8)) as made,
    ):
        yield made


@pytest.mark.asyncio
@pytest.mark.parametrize("agent", AGENTS)
async def test_sessions_of_an_sdk(gateway: AgentGateway, agent: Agent) -> None:
    await check_sdk(gateway, agent)


@pytest.mark.asyncio
async def test_sessions_of_a_coding_agent(gateway: AgentGateway, tmp_path: Path) -> None:
    await check_coding_agent(gateway, tmp_path)
