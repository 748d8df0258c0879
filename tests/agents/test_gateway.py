"""Test the APIs of the gateway by real HTTP requests: answers, streams, limits, errors, keys."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from helmsman import RolloutController, SamplingParams
from helmsman.agents import AgentGateway, AgentSession, SessionLimits
from helmsman.agents._messages import BadRequestError
from tests.agents.toy_model import CHAT_TOOL, SECRETS, TOOL, question

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": question(1)}],
    "tools": [CHAT_TOOL],
}


async def post(
    session: AgentSession, path: str, body: Any, key: str | None = None, **headers: str
) -> tuple[int, Any, Any]:
    """Return status, headers and decoded body."""
    url = f"{session.base_url}/{path}"
    headers = {"Authorization": f"Bearer {session.key if key is None else key}", **headers}
    async with (
        aiohttp.ClientSession() as client,
        client.post(url, json=body, headers=headers) as response,
    ):
        text = await response.text()
        kind = response.content_type
        return response.status, response.headers, json.loads(text) if "json" in kind else text


async def answer(session: AgentSession, body: Any = CHAT, path: str = "chat/completions") -> Any:
    status, _, found = await post(session, path, body)
    assert status == 200, found
    return found


@pytest.mark.asyncio
async def test_turns_continue_sampled_tokens(gateway: AgentGateway) -> None:
    with gateway.session(seed=3) as session:
        messages = list(CHAT["messages"])
        num_calls = 0
        for _ in range(12):
            found = await answer(session, {**CHAT, "messages": messages, "return_token_ids": True})
            choice = found["choices"][0]
            messages.append(choice["message"])
            calls = choice["message"].get("tool_calls", [])
            num_calls += len(calls)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": SECRETS[0]}
                for call in calls
            ]
            if not calls:
                messages.append({"role": "user", "content": question(2)})
        (sample,) = session.samples()
    assert num_calls
    assert session.forks == []
    assert len(sample.turn_ends) == 12
    sampled = [i for i, is_sampled in enumerate(sample.loss_mask) if is_sampled]
    assert all(sample.logprobs[i] < 0 and sample.versions[i] == 0 for i in sampled)
    last = choice["token_ids"]
    assert sample.input_ids == [*found["prompt_token_ids"], *last]


@pytest.mark.asyncio
async def test_same_seed_same_session(gateway: AgentGateway) -> None:
    texts = []
    for _ in range(2):
        with gateway.session(seed=11) as session:
            found = [await answer(session, {**CHAT, "return_token_ids": True}) for _ in range(8)]
            texts.append([each["choices"][0]["token_ids"] for each in found])
    assert texts[0] == texts[1]
    assert len({tuple(each) for each in texts[0]}) > 1


@pytest.mark.asyncio
async def test_parallel_answers_are_branches(gateway: AgentGateway) -> None:
    with gateway.session() as session:
        found = await answer(session, {**CHAT, "n": 5, "logprobs": True})
        samples = session.samples()
    assert [each["index"] for each in found["choices"]] == [0, 1, 2, 3, 4]
    assert len(samples) == 5
    assert {sample.session_id for sample in samples} == {session.id}
    for choice, sample in zip(found["choices"], samples, strict=True):
        shown = [each["logprob"] for each in choice["logprobs"]["content"]]
        assert shown == sample.logprobs[-len(shown) :]


@pytest.mark.asyncio
async def test_branches_share_tokens(gateway: AgentGateway) -> None:
    with gateway.session() as session:
        message = (await answer(session))["choices"][0]["message"]
        for text in ("north", "south"):
            more = [message, {"role": "user", "content": text}]
            await answer(session, {**CHAT, "messages": [*CHAT["messages"], *more]})
        first, second = session.samples()
    end = first.turn_ends[0]
    assert first.input_ids[:end] == second.input_ids[:end]
    assert sum(first.loss_mask[:end]) > 0
    assert sum(second.loss_mask[:end]) == 0


@pytest.mark.asyncio
async def test_stop_text(gateway: AgentGateway) -> None:
    sampling = SamplingParams(max_new_tokens=200, temperature=3.0)
    stops = ["e", "a", "t"]
    body = {"messages": CHAT["messages"], "stop": stops, "return_token_ids": True}
    num_stopped = 0
    for seed in range(4):
        with gateway.session(sampling=sampling, seed=seed) as session:
            choice = (await answer(session, body))["choices"][0]
            (sample,) = session.samples()
        *before, last = choice["token_ids"]
        content = choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert sample.continuation == choice["token_ids"]
        assert content in gateway.template.decode(choice["token_ids"])
        # The last token has the stop text.
        shown = content + gateway.template.decode(before)
        assert not any(each in shown for each in stops)
        num_stopped += last not in gateway.template.stop_ids
    assert num_stopped


@pytest.mark.asyncio
async def test_stream_of_each_api(gateway: AgentGateway) -> None:
    bodies: dict[str, tuple[dict[str, Any], str]] = {
        "chat/completions": (CHAT, "data: [DONE]"),
        "responses": (
            {"input": question(1), "tools": [{"type": "function", **TOOL}]},
            "response.completed",
        ),
        "messages": (
            {
                "max_tokens": 8,
                "messages": CHAT["messages"],
                "tools": [{"name": "look", "input_schema": TOOL["parameters"]}],
            },
            "message_stop",
        ),
    }
    for path, (body, end) in bodies.items():
        with gateway.session() as session:
            _, headers, text = await post(session, path, {**body, "stream": True})
            assert headers["Content-Type"].startswith("text/event-stream")
            assert end in text.strip().rpartition("\n\n")[2]
            assert session.num_turns == 1


@pytest.mark.asyncio
async def test_requests_sent_again(gateway: AgentGateway) -> None:
    with gateway.session() as session:
        first = await post(session, "chat/completions", CHAT, **{"Idempotency-Key": "a"})
        second = await post(session, "chat/completions", CHAT, **{"Idempotency-Key": "a"})
        assert first[2] == second[2]
        assert session.num_turns == 1
        # The SDKs send no key, but count their attempts.
        plain = await answer(session)
        again = await post(session, "chat/completions", CHAT, **{"x-stainless-retry-count": "1"})
        assert again[2] == plain
        await answer(session)
        assert session.num_turns == 3


@pytest.mark.asyncio
async def test_key_of_another_session(gateway: AgentGateway) -> None:
    with gateway.session() as one, gateway.session() as other:
        for key in (other.key, gateway.key, "", "sk-x"):
            status, _, body = await post(one, "chat/completions", CHAT, key=key)
            assert status == 401
            assert "does not open this session" in body["error"]["message"]
        status, _, body = await post(one, "messages", {}, key=other.key)
        assert (status, body["type"]) == (401, "error")
    status, _, _ = await post(one, "chat/completions", CHAT)
    assert status == 401  # it has ended


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "change", "text"),
    [
        ("chat/completions", {"messages": []}, "has no messages"),
        ("chat/completions", {"messages": None}, "Expected `array`"),
        ("chat/completions", {"n": 0}, "n is 0; expected 1 to 128"),
        ("chat/completions", {"max_tokens": -1}, "expected 1 or more"),
        ("chat/completions", {"logit_bias": {"1": 2}}, "logit_bias is not supported"),
        ("chat/completions", {"tool_choice": "required"}, "forces the model"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "JSON in the prompt"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "images are not supported yet",
        ),
        ("chat/completions", {"messages": [{"role": "x", "content": ""}]}, "role is 'x'"),
        (
            "chat/completions",
            {"messages": [*CHAT["messages"], {"role": "assistant", "content": "a"}]},
            "continuing it is not supported",
        ),
        (
            "responses",
            {"input": "a", "tools": [{"type": "web_search"}]},
            "run on the vendor's servers",
        ),
        ("responses", {"input": "a", "previous_response_id": "x"}, "no response of this session"),
        ("messages", {"max_tokens": 1, "messages": [{"role": "system", "content": ""}]}, "role is"),
        ("messages", {"messages": CHAT["messages"]}, "max_tokens"),
    ],
)  # fmt: skip
async def test_errors_of_each_api(
    gateway: AgentGateway, path: str, change: dict[str, Any], text: str
) -> None:
    with gateway.session() as session:
        body = {**(CHAT if path == "chat/completions" else {}), **change}
        status, _, found = await post(session, path, body)
        assert status == 400
        assert text in found["error"]["message"]
        if path == "messages":
            assert found["type"] == "error"
        else:
            assert found["error"]["type"] == "invalid_request_error"
        assert session.num_turns == 0


@pytest.mark.asyncio
async def test_session_limits(gateway: AgentGateway) -> None:
    limits = SessionLimits(max_tokens=3, truncated_reward=-1.0)
    with gateway.session(limits=limits) as session:
        found = 0
        for _ in range(4):
            status, _, body = await post(session, "chat/completions", CHAT)
            if status == 400:
                break
            found += body["usage"]["completion_tokens"]
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded"
        assert found <= 3
        session.reward = 1.0
    assert session.is_truncated
    assert session.record().reward == -1.0
    with gateway.session(limits=SessionLimits(max_turns=1)) as session:
        await answer(session)
        status, _, body = await post(session, "chat/completions", CHAT)
        assert "1 of the session's 1 turns are used" in body["error"]["message"]


@pytest.mark.asyncio
async def test_outside_sessions_limited(rollout: RolloutController, toy: Path) -> None:
    with AgentGateway(
        rollout, toy, sampling=SamplingParams(max_new_tokens=4), max_pending=2
    ) as gateway:
        gateway.initialize()
        headers = {"Authorization": f"Bearer {gateway.key}"}
        async with aiohttp.ClientSession(gateway.url, headers=headers) as client:
            opened = []
            for _ in range(2):
                async with client.post("/sessions", json={"metadata": {"task": 7}}) as response:
                    opened.append(await response.json())
            async with client.post("/sessions") as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "1"
                assert "2 sessions of outside agents are open" in await response.text()
            for each in opened:
                own = {"Authorization": f"Bearer {each['api_key']}"}
                root = each["base_url"].removesuffix("/v1")
                url = f"{root}/v1/chat/completions"
                async with client.post(url, json=CHAT, headers=own) as response:
                    assert response.status == 200
                async with client.post(
                    f"{root}/finish", json={"reward": 0.5}, headers=own
                ) as response:
                    assert await response.json() == {"reward": 0.5, "num_turns": 1}
            records = await gateway.collect(2)
            assert [each.metadata for each in records] == [{"task": 7}] * 2
            assert all(each.reward == 0.5 and each.samples for each in records)
            async with client.post("/sessions") as response:
                assert response.status == 200


@pytest.mark.asyncio
async def test_gateway_full(rollout: RolloutController, toy: Path) -> None:
    with (
        AgentGateway(rollout, toy, max_turns_in_flight=1) as gateway,
        gateway.session() as session,
    ):
        rollout.pause()
        try:
            first = asyncio.create_task(post(session, "chat/completions", CHAT))
            await until(lambda: gateway.is_full)
            status, headers, body = await post(session, "chat/completions", CHAT)
        finally:
            rollout.resume()
        assert (status, headers["Retry-After"]) == (429, "1")
        assert body["error"]["type"] == "rate_limit_error"
        assert (await first)[0] == 200


async def until(condition: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(condition):
        pass


def failing_agent(gateway: AgentGateway) -> None:
    with gateway.session("c") as session:
        asyncio.run(session.complete(CHAT["messages"]))
        raise ZeroDivisionError


def test_journal_of_sessions(rollout: RolloutController, toy: Path, tmp_path: Path) -> None:
    path = tmp_path / "sessions.sqlite"

    async def turn(session: AgentSession) -> None:
        message = await session.complete(CHAT["messages"], tools=[CHAT_TOOL])
        assert message["role"] == "assistant"

    with AgentGateway(rollout, toy, journal=path) as gateway:
        for name in ("a", "b"):
            with gateway.session(name, metadata={"row": 1}) as session:
                asyncio.run(turn(session))
                session.reward = 0.25
        with pytest.raises(ZeroDivisionError):
            failing_agent(gateway)
        expected = gateway.finished("b")
    with AgentGateway(rollout, toy, journal=path) as gateway:
        found = gateway.finished("b")
        assert found is not None
        assert expected is not None
        assert found.samples == expected.samples
        assert (found.reward, found.metadata) == (0.25, {"row": 1})
        assert gateway.finished("c") is None
        gateway.forget(["a", "b"])
    with AgentGateway(rollout, toy, journal=path) as gateway:
        assert gateway.finished("b") is None


@pytest.mark.asyncio
async def test_complete_without_http(gateway: AgentGateway) -> None:
    with gateway.session() as session:
        with pytest.raises(BadRequestError, match="has no messages"):
            await session.complete([])
        message = await session.complete(CHAT["messages"], tools=[CHAT_TOOL])
        session.set_turn_reward(0, 0.5)
        session.reward = 1.0
        (sample,) = session.samples()
    assert message["role"] == "assistant"  # without content if the end token was drawn first
    assert sample.returns() == [1.5]
    assert math.isclose(session.record().model_seconds, session.record().seconds, abs_tol=5.0)
