"""Tests that hostile bodies and requests to an agent gateway are refused and harm no session."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from helmsman.agents import AgentGateway, AgentSession
from tests.agents.constant_model import constant_rollout, plain_tokenizer

PATHS = ("chat/completions", "responses", "messages")
GOOD: dict[str, Any] = {
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "responses": {"input": "a"},
    "messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]},
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[AgentGateway]:
    with constant_rollout() as rollout, AgentGateway(rollout, plain_tokenizer()) as made:
        yield made


async def send(session: AgentSession, path: str, data: bytes) -> tuple[int, dict[str, Any]]:
    headers = {"x-api-key": session.key, "Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{session.base_url}/{path}", data=data, headers=headers) as response,
    ):
        return response.status, await response.json()


async def assert_works(session: AgentSession) -> None:
    for path, body in GOOD.items():
        status, found = await send(session, path, json.dumps(body).encode())
        assert status == 200, found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"messages":' * 50_000, 400, "not JSON"),
        (b'{"messages": "\xff\xfe"}', 400, "not JSON"),
        (b"", 400, "not JSON"),
        (b"[]", 400, "not a JSON object"),
        (b"null", 400, "not a JSON object"),
        (b" " * ((32 << 20) + 1), 413, "larger than 32 MiB"),
    ],
    ids=["deep", "deep objects", "not UTF-8", "empty", "array", "null", "large"],
)
async def test_malformed_body(
    gateway: AgentGateway, path: str, data: bytes, status: int, text: str
) -> None:
    with gateway.session() as session:
        found, body = await send(session, path, data)
        assert found == status
        assert text in body["error"]["message"]
        assert session.num_turns == 0
        await assert_works(session)


@pytest.mark.parametrize(
    ("path", "change", "text"),
    [
        ("chat/completions", {"tools": [{"function": "x"}]}, "a tool is 'x'; expected an object"),
        ("chat/completions", {"stream": True, "stream_options": "x"}, "Expected `object"),
        ("chat/completions", {"max_completion_tokens": 0}, "max_tokens is 0; expected 1"),
        ("responses", {"text": {"format": "x"}}, "JSON schema is not supported"),
        ("../reward", {"reward": 10**400}, "expected a number"),
    ],
)
async def test_wrong_values(
    gateway: AgentGateway, path: str, change: dict[str, Any], text: str
) -> None:
    with gateway.session() as session:
        status, found = await send(
            session, path, json.dumps({**GOOD.get(path, {}), **change}).encode()
        )
        assert (status, session.num_turns) == (400, 0)
        assert text in found["error"]["message"]


async def first_line(gateway: AgentGateway, data: bytes) -> bytes:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    found = await reader.readline()
    writer.close()
    return found


async def test_undecodable_bodies(gateway: AgentGateway) -> None:
    with gateway.session() as session:
        for encoding in ("gzip", "deflate"):
            head = (
                f"POST /sessions/{session.id}/v1/responses HTTP/1.1\r\nHost: x\r\nx-api-key: "
                f"{session.key}\r\nContent-Encoding: {encoding}\r\nContent-Length: 4\r\n\r\n"
            )
            assert (await first_line(gateway, head.encode() + b"\0junk")).split()[1] == b"400"
        await assert_works(session)


async def test_key_that_is_not_text(gateway: AgentGateway) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: \xff\xfe\r\n\r\n"
    assert (await first_line(gateway, head)).split()[1] == b"401"


def junk(draw: random.Random, depth: int = 0) -> Any:
    texts = ["", "a" * 50, "\ud800", "user", "function"]
    leaves: list[Any] = [None, True, -1, 1 << 70, 1e308, *texts, [], {}]
    kind = draw.randrange(4 if depth < 4 else 1)
    if kind == 1:
        return [junk(draw, depth + 1) for _ in range(draw.randrange(3))]
    if kind >= 2:
        names = ["role", "content", "type", "text", "name", "arguments", "function", "id", "input"]
        return {draw.choice(names): junk(draw, depth + 1) for _ in range(draw.randrange(4))}
    return draw.choice(leaves)


@pytest.mark.parametrize("path", PATHS)
async def test_wrong_types(gateway: AgentGateway, path: str) -> None:
    draw = random.Random(path)
    fields = [
        "messages", "input", "tools", "tool_choice", "stop", "n", "seed", "max_tokens", "stream",
        "temperature", "system", "instructions", "stop_sequences", "logprobs", "text",
        "stream_options", "chat_template_kwargs", "metadata", "previous_response_id",
    ]  # fmt: skip
    with gateway.session() as session:
        statuses = set()
        for _ in range(100):
            body = dict(GOOD[path])
            for field in draw.sample(fields, 3):
                body[field] = junk(draw)
            if draw.random() < 0.5 and isinstance(body.get("messages"), list):
                body["messages"] = [
                    {"role": draw.choice(["user", "assistant", "tool"]), "content": junk(draw)}
                ] + body["messages"]
            headers = {"x-api-key": session.key}
            async with (
                aiohttp.ClientSession() as client,
                client.post(
                    f"{session.base_url}/{path}", data=json.dumps(body), headers=headers
                ) as response,
            ):
                statuses.add(response.status)
                await response.read()
        assert statuses <= {200, 400}
        await assert_works(session)


async def test_slow_bodies_delay_no_other_request(gateway: AgentGateway) -> None:
    with gateway.session() as session:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        peers = []
        for _ in range(50):
            peer = socket.create_connection((host, int(port)))
            head = (
                f"POST /sessions/{session.id}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                f"x-api-key: {session.key}\r\nContent-Length: 1000\r\n\r\n{{"
            )
            peer.sendall(head.encode())
            peers.append(peer)
        await assert_works(session)
        for peer in peers:
            peer.close()


async def test_other_paths(gateway: AgentGateway) -> None:
    with gateway.session() as session:
        async with aiohttp.ClientSession(headers={"x-api-key": session.key}) as client:
            for path in ("/", "/v1/files", "/sessions/../../etc/passwd", "/sessions/x/v1/models"):
                async with client.get(gateway.url + path) as response:
                    assert response.status in (401, 404)
                    assert "error" in await response.json()


def test_gateway_listens_on_loopback(gateway: AgentGateway) -> None:
    assert gateway.url.startswith("http://127.0.0.1:")


async def test_hostile_session_ids(gateway: AgentGateway) -> None:
    with gateway.session() as session, gateway.session() as other:
        url = session.base_url.replace(session.id, other.id)
        headers = {"x-api-key": session.key}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{url}/responses", json={"input": "a"}, headers=headers) as response,
        ):
            assert response.status == 401
        root = url.removesuffix("/v1")
        for end in ("reward", "finish"):
            async with (
                aiohttp.ClientSession() as client,
                client.post(f"{root}/{end}", json={"reward": 9}, headers=headers) as response,
            ):
                assert response.status == 401
        assert other.reward == 0.0
        assert not other.is_closed
        await asyncio.gather(assert_works(session), assert_works(other))
