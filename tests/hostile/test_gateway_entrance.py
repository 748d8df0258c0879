"""Tests that an agent gateway reads no body of peers without a key, and logs nothing of any."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator

import pytest

from helmsman.agents import AgentGateway, AgentSession
from tests.agents.constant_model import constant_rollout, plain_tokenizer
from tests.hostile.test_agent_gateway import assert_works

SECRET = "secret-of-a-client"
OPEN = "sessions/x/v1/chat/completions"


@pytest.fixture(scope="module")
def gateway() -> Iterator[AgentGateway]:
    with constant_rollout() as rollout, AgentGateway(rollout, plain_tokenizer()) as made:
        made.initialize()
        yield made


async def exchange(gateway: AgentGateway, *parts: str, num_bytes: int = -1) -> str:
    """Send parts of one connection, and return its answers until its end."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    found = b""
    for part in parts:
        writer.write(part.encode())
        found += await reader.read(num_bytes)
    writer.close()
    return found.decode()


def head(session: AgentSession, *lines: str, path: str = "chat/completions") -> str:
    """Return the head of a request of an agent."""
    first = f"POST /sessions/{session.id}/v1/{path} HTTP/1.1"
    return "\r\n".join((first, "Host: x", f"x-api-key: {session.key}", *lines, "", ""))


@pytest.mark.parametrize("path", ["v1/models", OPEN, "sessions", "sessions/x/finish", "other"])
@pytest.mark.parametrize(
    "lines",
    [
        "Content-Length: 100",
        "Content-Length: 100\r\nExpect: 100-continue",
        "Transfer-Encoding: chunked",
        "x-api-key: sk-x\r\nContent-Length: 100",
        "Authorization: Bearer sk-x\r\nUpgrade: websocket\r\nConnection: Upgrade",
    ],
)
async def test_no_key_no_body(gateway: AgentGateway, path: str, lines: str) -> None:
    answer = await exchange(gateway, f"POST /{path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n\r\n")
    first, _, rest = answer.partition("\r\n")
    assert first == "HTTP/1.1 401 Unauthorized"
    assert "Connection: close" in rest
    error = json.loads(rest.partition("\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


async def test_refusal_in_the_dialect_of_the_path(gateway: AgentGateway) -> None:
    path = OPEN.replace("chat/completions", "messages")
    answer = await exchange(gateway, f"POST /{path}?beta=true HTTP/1.1\r\nHost: x\r\n\r\n")
    assert json.loads(answer.partition("\r\n\r\n")[2])["type"] == "error"


@pytest.mark.parametrize(
    "request_",
    [
        "GET / HTTP/1.1\nHost: x\n\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01",
        "GET /\r\n\r\n",
    ],
    ids=["line feeds", "HTTP/2", "TLS", "HTTP/0.9"],
)
async def test_other_protocols(gateway: AgentGateway, request_: str) -> None:
    answer = await exchange(gateway, request_)
    assert answer.startswith("HTTP/1.1 400 Bad Request\r\n")
    assert "the request is not HTTP/1.1" in answer


async def test_malformed_requests_leave_no_text_in_logs(
    gateway: AgentGateway, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway.session() as session:
        good = head(session, "Content-Length: 2") + "{}"
        for bad in (
            head(session, SECRET),
            head(session, f"{SECRET} : x"),
            head(session, f"Content-Length: -{SECRET}"),
            head(session, "Transfer-Encoding: chunked") + f"{SECRET}\r\n",
            head(session, f"x: {SECRET}").replace("\r\n", "\n"),
        ):
            for before in ([], [good]):
                answer = await exchange(gateway, *before, bad, num_bytes=1 << 16)
                assert re.findall(r"HTTP/1\.[01] (\d+) ", answer)[-1] == "400"
        await assert_works(session)
        assert SECRET not in caplog.text
        assert session.key not in caplog.text
    assert len(caplog.records) <= 1


async def test_errors_of_the_gateway_leave_no_text_in_logs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = plain_tokenizer()
    with constant_rollout() as rollout, AgentGateway(rollout, tokenizer) as gateway:

        def fail(*_: object, **__: object) -> None:
            raise LookupError(SECRET)

        with gateway.session() as session:
            tokenizer.decode = fail
            body = json.dumps({"messages": [{"role": "user", "content": SECRET}]})
            request = head(session, f"Content-Length: {len(body)}") + body
            answer = await exchange(gateway, request, num_bytes=1 << 16)
    assert " 500 " in answer.partition("\r\n")[0]
    assert "a request failed (chat/completions): LookupError" in caplog.text
    assert "in fail" in caplog.text
    assert SECRET not in caplog.text


async def test_clients_that_leave_leave_nothing_in_logs(
    gateway: AgentGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    body = json.dumps({"stream": True, "messages": [{"role": "user", "content": "a"}]})
    with gateway.session() as session:
        request = head(session, f"Content-Length: {len(body)}") + body
        for num_sent in range(len(request) - len(body), len(request) + 1):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(request[:num_sent].encode())
            await writer.drain()
            writer.transport.abort()
        await assert_works(session)
    assert caplog.records == []
