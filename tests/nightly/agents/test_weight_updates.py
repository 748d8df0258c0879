"""Test that sessions continue over weight updates, with the version of each token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman import Job, RolloutController, SamplingParams, Scheduler, SchedulingSpec
from helmsman.agents import AgentGateway, AgentSession, Sample
from tests.agents.conftest import HF

NUM_SESSIONS = 8


@pytest.fixture
def rollout(scheduler: Scheduler, toy: Path) -> Iterator[RolloutController]:
    job = Job(role="updated", replicas=2, tasks=[SchedulingSpec(cpu=0.5)])
    with RolloutController(scheduler, HF, job, (), {"model": str(toy)}) as made:
        yield made


def models_of(toy: Path, num_versions: int) -> list[Any]:
    """The toy model, and others with changed weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    models = [AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)]
    for _ in range(1, num_versions):
        model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        models.append(model)
    return models


def check(sample: Sample, models: list[Any]) -> set[int]:
    """Recompute all log-probabilities; return the versions of the tokens."""
    import torch

    ids = torch.tensor([sample.input_ids])
    with torch.no_grad():
        rows = [model(ids).logits[0].log_softmax(-1) for model in models]
    found = set()
    for place, is_sampled in enumerate(sample.loss_mask):
        if is_sampled:
            version, token = sample.versions[place], sample.input_ids[place]
            found.add(version)
            assert abs(rows[version][place - 1, token] - sample.logprobs[place]) < 1e-4
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("in_flight", ["abort", "wait"])
async def test_sessions_pause_for_updates(
    rollout: RolloutController, toy: Path, in_flight: Any
) -> None:
    models = models_of(toy, 4)
    sampling = SamplingParams(max_new_tokens=96, temperature=1.5)

    async def talk(session: AgentSession, updated: list[asyncio.Event]) -> None:
        messages: list[Any] = []
        for number in range(8):
            messages.append({"role": "user", "content": f"where {number}"})
            messages.append(await session.complete(messages))
            begun[session.id].set()
            if number in (1, 5):  # the last turns come after all updates
                await updated[0 if number == 1 else -1].wait()

    with AgentGateway(rollout, toy, sampling=sampling) as gateway:
        sessions = [gateway.session() for _ in range(NUM_SESSIONS)]
        begun = {session.id: asyncio.Event() for session in sessions}
        updated = [asyncio.Event() for _ in models[1:]]
        talks = [asyncio.create_task(talk(session, updated)) for session in sessions]
        await asyncio.gather(*(each.wait() for each in begun.values()))
        for version, event in enumerate(updated, start=1):
            weights = {name: each.data for name, each in models[version].named_parameters()}
            await rollout.async_pause(in_flight)
            assert await rollout.async_update_weights(weights, version) == version
            await rollout.async_resume()
            event.set()
        await asyncio.gather(*talks)
        versions: set[int] = set()
        for session in sessions:
            session.close()
            (sample,) = session.samples()
            assert len(sample.turn_ends) == 8
            versions |= (found := check(sample, models))
            assert len(found) > 1
    assert {0, 3} <= versions
