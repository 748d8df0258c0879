"""Test turns of agents that leave, send requests again or reach limits, and their sessions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from helmsman import HelmsmanError, RolloutController
from helmsman.agents import AgentGateway, AgentSession, SessionLimits
from helmsman.agents._messages import BadRequestError
from tests.agents.constant_model import Constant, constant_rollout, plain_tokenizer

CHAT = {"messages": [{"role": "user", "content": "a"}]}
STREAM = {**CHAT, "stream": True}


@pytest.fixture(scope="module")
def rollout() -> Iterator[RolloutController]:
    with constant_rollout() as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return plain_tokenizer()


@pytest.fixture
def gateway(rollout: RolloutController, tokenizer: Any) -> Iterator[AgentGateway]:
    with AgentGateway(rollout, tokenizer) as made:
        yield made


async def send(
    session: AgentSession, body: dict[str, Any] = CHAT, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(headers={"x-api-key": session.key, **(headers or {})}) as client,
        client.post(f"{session.base_url}/chat/completions", json=body) as response,
    ):
        return response.status, await response.text()


async def until(condition: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(condition):
        pass


@contextlib.asynccontextmanager
async def held_turn(
    rollout: RolloutController,
    session: AgentSession,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
) -> AsyncIterator[asyncio.Task[tuple[int, str]]]:
    """Hold the turn of a request in the rollout's queue while the body runs."""
    rollout.pause()
    try:
        request = asyncio.create_task(send(session, body, headers))
        await until(lambda: rollout.stats().num_queued == 1)
        yield request
    finally:
        rollout.resume()


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_agent_leaves(
    rollout: RolloutController, gateway: AgentGateway, body: dict[str, Any]
) -> None:
    with gateway.session() as session:
        async with held_turn(rollout, session, body) as request:
            request.cancel()
            await until(lambda: rollout.stats().num_queued == 0)
        assert (await send(session))[0] == 200
        assert session.num_turns == 1


@pytest.mark.asyncio
async def test_agent_leaves_during_stream(
    rollout: RolloutController, gateway: AgentGateway
) -> None:
    long = {**STREAM, "n": 128, "logprobs": True}
    with gateway.session() as session:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        data = json.dumps(long).encode()
        head = (
            f"POST /sessions/{session.id}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            f"x-api-key: {session.key}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        for _ in range(5):
            rollout.pause()
            with socket.create_connection((host, int(port))) as peer:
                peer.sendall(head.encode() + data)
                await until(lambda: rollout.stats().num_queued == 128)
            rollout.resume()
        await until(lambda: not session.running)
        assert session.num_turns == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_request_with_key_is_answered_later(
    rollout: RolloutController, gateway: AgentGateway, body: dict[str, Any]
) -> None:
    key = {"Idempotency-Key": "k"}
    with gateway.session() as session:
        async with held_turn(rollout, session, body, key) as request:
            request.cancel()
        await until(lambda: not session.running)
        first = await send(session, body, key)
        assert first[0] == 200
        assert first == await send(session, body, key)
        assert session.num_turns == len(session.samples()) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("headers", [{"Idempotency-Key": "k"}, {"x-stainless-retry-count": "1"}])
async def test_one_of_two_agents_leaves(
    rollout: RolloutController, gateway: AgentGateway, headers: dict[str, str]
) -> None:
    with gateway.session() as session:
        async with held_turn(rollout, session, STREAM, headers) as request:
            second = asyncio.create_task(send(session, STREAM, headers))
            (turn,) = session.requests.values()
            await until(lambda: turn.num_waiting == 2)
            request.cancel()
            await until(lambda: turn.num_waiting == 1)
        assert (await second)[0] == 200
        assert session.num_turns == 1


@pytest.mark.asyncio
async def test_key_of_another_request(gateway: AgentGateway) -> None:
    other = {"messages": [{"role": "user", "content": "b"}]}
    with gateway.session() as session:
        assert (await send(session, CHAT, {"Idempotency-Key": "k"}))[0] == 200
        status, text = await send(session, other, {"Idempotency-Key": "k"})
        assert status == 422
        assert "was used for a different request; use a new key" in text


@pytest.mark.asyncio
async def test_requests_sent_again(gateway: AgentGateway) -> None:
    keys = [{"Idempotency-Key": str(number)} for number in range(40)]
    with gateway.session() as session:
        first = await asyncio.gather(*(send(session, CHAT, key) for key in keys))
        assert first == await asyncio.gather(*(send(session, CHAT, key) for key in keys))
        assert session.num_turns == 40


@pytest.mark.asyncio
async def test_failed_request_may_be_sent_again(gateway: AgentGateway) -> None:
    with gateway.session(limits=SessionLimits(max_context=1)) as session:
        for _ in range(2):
            status, text = await send(session, CHAT, {"Idempotency-Key": "k"})
            assert status == 400
            assert "no tokens are left" in text
        assert not session.requests


@pytest.mark.asyncio
async def test_limits_count_answers_and_parallel_turns(
    rollout: RolloutController, gateway: AgentGateway
) -> None:
    with gateway.session(limits=SessionLimits(max_turns=3)) as session:
        status, text = await send(session, {**CHAT, "n": 4})
        assert (status, session.num_turns) == (400, 0)
        assert "0 of the session's 3 turns are used, and 4 are requested" in text
        rollout.pause()
        requests = [asyncio.create_task(send(session)) for _ in range(5)]
        await until(lambda: rollout.stats().num_queued == 3)
        assert not any(each.done() for each in requests)  # two wait for the others
        rollout.resume()
        assert sorted(status for status, _ in await asyncio.gather(*requests)) == [
            200, 200, 200, 400, 400,
        ]  # fmt: skip
    with gateway.session(limits=SessionLimits(max_tokens=4)) as session:
        rollout.pause()
        first = asyncio.create_task(send(session, {**CHAT, "max_tokens": 4}))
        await until(lambda: bool(rollout.stats().num_queued))
        second = asyncio.create_task(send(session, {**CHAT, "n": 3, "max_tokens": 1}))
        await until(lambda: len(session.running) == 2)
        assert rollout.stats().num_queued == 1
        rollout.resume()
        assert [(await each)[0] for each in (first, second)] == [200, 200]
        assert not session.is_truncated
        status, text = await send(session)
        assert "4 of at most 4 were sampled in this session" in text
        assert session.is_truncated


@pytest.mark.asyncio
async def test_session_ends_during_turn(rollout: RolloutController, gateway: AgentGateway) -> None:
    with gateway.session() as session:
        async with held_turn(rollout, session, CHAT) as request:
            direct = asyncio.create_task(session.complete(CHAT["messages"]))
            await until(lambda: rollout.stats().num_queued == 2)
            session.close()
            status, text = await request
            with pytest.raises(BadRequestError, match="is closed; open another one"):
                await direct
        assert status == 400
        assert "session_closed" in text
        assert session.num_turns == 0


@pytest.mark.asyncio
async def test_gateway_closed(rollout: RolloutController, tokenizer: Any) -> None:
    gateway = AgentGateway(rollout, tokenizer)
    session = gateway.session()
    waiting = asyncio.create_task(gateway.collect(1))
    await asyncio.sleep(0)
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as peer:  # it never sends its body
        peer.sendall(
            f"POST /sessions/{session.id}/v1/responses HTTP/1.1\r\nHost: x\r\n"
            f"x-api-key: {session.key}\r\nContent-Length: 9\r\n\r\n".encode()
        )
        await asyncio.to_thread(gateway.close)
    gateway.close()
    assert session.is_closed
    with pytest.raises(HelmsmanError, match="the gateway was closed while collect"):
        await waiting
    with pytest.raises(HelmsmanError, match="the gateway is closed; make a new one"):
        gateway.session()
    with pytest.raises(HelmsmanError, match="the gateway is closed; make a new one"):
        await session.complete(CHAT["messages"])


@contextlib.asynccontextmanager
async def client_of(gateway: AgentGateway) -> AsyncIterator[aiohttp.ClientSession]:
    gateway.initialize()
    headers = {"Authorization": f"Bearer {gateway.key}"}
    async with aiohttp.ClientSession(gateway.url, headers=headers) as client:
        yield client


async def open_outside(client: aiohttp.ClientSession, name: str) -> tuple[int, dict[str, Any]]:
    async with client.post("/sessions", json={"name": name}) as response:
        return response.status, await response.json()


async def finish(client: aiohttp.ClientSession, opened: dict[str, Any]) -> None:
    root = opened["base_url"].removesuffix("/v1")
    headers = {"Authorization": f"Bearer {opened['api_key']}"}
    async with client.post(f"{root}/finish", json={"reward": 1}, headers=headers) as response:
        assert response.status == 200


@pytest.mark.asyncio
async def test_journal_outside_sessions(
    rollout: RolloutController, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "sessions.sqlite"
    with AgentGateway(rollout, tokenizer, journal=path) as gateway:
        async with client_of(gateway) as client:
            opened = [(await open_outside(client, name))[1] for name in "abcd"]
            status, found = await open_outside(client, "a")
            assert status == 400
            assert "session 'a' is already open or finished" in found["error"]["message"]
            with pytest.raises(ValueError, match="session 'a' is already open"):
                gateway.session("a")
            await finish(client, opened[0])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(gateway.collect(2), 0.01)
            for each in opened[1:3]:
                await finish(client, each)
            assert [each.name for each in await gateway.collect(2)] == ["a", "b"]
            gateway.forget(["a"])
    with AgentGateway(rollout, tokenizer, journal=path) as gateway:
        # "d" was open, and "a" is forgotten; "b" was collected, and not forgotten.
        assert [each.name for each in await gateway.collect(2)] == ["b", "c"]


@pytest.mark.asyncio
async def test_outside_agent_never_returns(rollout: RolloutController, tokenizer: Any) -> None:
    with AgentGateway(rollout, tokenizer, max_pending=1, outside_timeout=0.0) as gateway:
        async with client_of(gateway) as client:
            _, opened = await open_outside(client, "a")
            assert (await open_outside(client, "b"))[0] == 200
            key = {"Authorization": f"Bearer {opened['api_key']}"}
            async with client.post("/v1/responses", json={"input": "a"}, headers=key) as response:
                assert response.status == 401


@pytest.mark.asyncio
async def test_tools_without_template(
    gateway: AgentGateway, caplog: pytest.LogCaptureFixture
) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    with gateway.session() as session:
        for _ in range(2):
            assert (await send(session, {**CHAT, "tools": [tool]}))[0] == 200
    warnings = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].endswith("its chat template does not show tools. Use one that does")


@pytest.mark.asyncio
async def test_prompt_refused_by_engine(
    gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Constant, "refuses", True)
    with gateway.session() as session:
        status, text = await send(session)
    assert status == 400
    assert json.loads(text)["error"] == {
        "message": "the prompt is too long",
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }
    assert session.is_truncated


@pytest.mark.asyncio
async def test_finish_session_of_script(gateway: AgentGateway) -> None:
    with gateway.session() as session:
        async with aiohttp.ClientSession() as client:
            await finish(client, {"base_url": session.base_url, "api_key": session.key})
        assert not session.is_closed
        assert session.reward == 1.0


def test_journal_damaged(rollout: RolloutController, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "sessions.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(OSError, match=r"sessions\.sqlite cannot be used: file is not a database"):
        AgentGateway(rollout, tokenizer, journal=path)
