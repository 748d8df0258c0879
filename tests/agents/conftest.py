"""A toy model in two rollout instances, shared by all tests of agents, and a gateway to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman import (
    Job,
    RolloutController,
    SamplingParams,
    Scheduler,
    SchedulingSpec,
    make_scheduler,
)
from helmsman.agents import AgentGateway
from tests.agents.toy_model import make_toy
from tests.engines.preload import PRELOAD

HF = "helmsman.engines.rollout.HFRolloutEngine"


@pytest.fixture(scope="package")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="package")
def scheduler() -> Iterator[Scheduler]:
    with make_scheduler("local", preload=PRELOAD) as made:
        yield made


@pytest.fixture(scope="package")
def rollout(scheduler: Scheduler, toy: Path) -> Iterator[RolloutController]:
    job = Job(role="rollout", replicas=2, tasks=[SchedulingSpec(cpu=0.5)])
    with RolloutController(scheduler, HF, job, (), {"model": str(toy)}) as made:
        yield made


@pytest.fixture(scope="module")
def gateway(rollout: RolloutController, toy: Path) -> Iterator[AgentGateway]:
    with AgentGateway(rollout, toy, sampling=SamplingParams(max_new_tokens=8)) as made:
        yield made
