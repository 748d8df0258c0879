"""Reports about agents that use the model through an API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from helmsman import (
    Job,
    RolloutController,
    SamplingParams,
    TrainController,
    WeightSync,
    make_scheduler,
)
from helmsman.agents import AgentGateway, AgentSession
from tests.agents.constant_model import constant_rollout, plain_tokenizer
from tests.contract.helpers import LIMIT_S
from tests.field.engines import Exclusive, Published

NUM_SESSIONS = 50
QUESTION: dict[str, Any] = {"role": "user", "content": "where"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return plain_tokenizer()


@pytest.fixture
def rollout() -> Iterator[RolloutController]:
    with constant_rollout() as made:
        yield made


# --- AReaL #1618 ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_sessions_pause_for_updates(tokenizer: Any) -> None:
    """AReaL #1618: agents go on with the old weights, as updates do not pause their proxy.

    No turn runs while an instance loads weights, and all tokens of a turn have one version.
    """
    with (
        make_scheduler("inline") as scheduler,
        TrainController(scheduler, Published, Job(role="train")) as trainer,
        RolloutController(scheduler, Exclusive, Job(role="rollout", replicas=2)) as rollout,
        AgentGateway(rollout, tokenizer, sampling=SamplingParams(max_new_tokens=4)) as gateway,
    ):
        sync = WeightSync(trainer, rollout, in_flight="wait")
        sessions = [gateway.session() for _ in range(8)]
        version = 0

        async def talk(session: AgentSession) -> None:
            messages = [QUESTION]
            while version < 20 or len(messages) < 8:
                begun_at = version
                messages += [await session.complete(messages), QUESTION]
                assert set(session.samples()[-1].versions[-3:]) <= {*range(begun_at, 21)}

        talks = [asyncio.create_task(talk(each)) for each in sessions]
        for number in range(1, 21):
            await trainer.async_set_version(number)
            report = await sync.async_push()
            assert (len(report.updated), report.failed) == (2, {})
            version = number
        await asyncio.gather(*talks)
        for session in sessions:
            session.close()
            (sample,) = session.samples()
            begin = 0
            for end in sample.turn_ends:
                made = [
                    each
                    for each, is_made in zip(
                        sample.versions[begin:end], sample.loss_mask[begin:end], strict=True
                    )
                    if is_made
                ]
                assert len(set(made)) == 1
                begin = end


# --- AReaL #1498 ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_requests_that_the_sdk_repeats(rollout: RolloutController, tokenizer: Any) -> None:
    """AReaL #1498: the SDK repeats a request after its time-out, and trajectories are split.

    The orphaned answer of the first attempt must not become a branch of the session.
    """
    sent: dict[str, int] = {}
    all_repeat = asyncio.Event()

    async def count(request: Any) -> None:
        key = request.headers["authorization"]
        sent[key] = sent.get(key, 0) + 1
        if len(sent) == NUM_SESSIONS and min(sent.values()) >= 2:
            all_repeat.set()

    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [count]})

    async def talk(session: AgentSession) -> None:
        client = openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.key, max_retries=50, http_client=http
        )
        messages = [QUESTION]
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="policy",
                messages=messages,  # type: ignore[arg-type]
                timeout=LIMIT_S if all_repeat.is_set() else 0.2,
            )
            messages += [answer.choices[0].message.model_dump(exclude_none=True), QUESTION]

    with AgentGateway(rollout, tokenizer) as gateway:
        sessions = [gateway.session() for _ in range(NUM_SESSIONS)]
        await rollout.async_pause()
        talks = [asyncio.create_task(talk(each)) for each in sessions]
        await all_repeat.wait()
        await rollout.async_resume()
        await asyncio.gather(*talks)
        await http.aclose()
        for session in sessions:
            session.close()
            assert session.num_turns == 2
            (sample,) = session.samples()
            assert len(sample.turn_ends) == 2
