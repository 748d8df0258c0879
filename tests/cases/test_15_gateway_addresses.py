"""A gateway gives agents an address that they can reach, and answers any JSON of Python."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from helmsman import RolloutController
from helmsman.agents import AgentGateway
from tests.agents.constant_model import constant_rollout, plain_tokenizer

HAS_IPV6 = socket.has_dualstack_ipv6()
CHAT = {"messages": [{"role": "user", "content": "a"}]}
LONE = "\ud800"
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "messages": {"max_tokens": 4, **CHAT},
    "responses": {"input": "a"},
}


@pytest.fixture(scope="module")
def rollout() -> Iterator[RolloutController]:
    with constant_rollout() as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return plain_tokenizer()


@pytest.fixture(scope="module")
def gateway(rollout: RolloutController, tokenizer: Any) -> Iterator[AgentGateway]:
    with AgentGateway(rollout, tokenizer) as made:
        yield made


def port_of(gateway: AgentGateway) -> int:
    gateway.initialize()
    port = urlsplit(gateway.url).port
    assert port
    return port


async def opened(gateway: AgentGateway, url: str, **headers: str) -> str:
    """Return the base URL that an agent receives."""
    headers = {"Authorization": f"Bearer {gateway.key}", **headers}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{url}/sessions", json={}) as response,
    ):
        assert response.status == 200
        return str((await response.json())["base_url"])


async def models(base_url: str, key: str) -> int:
    async with (
        aiohttp.ClientSession(headers={"x-api-key": key}) as client,
        client.get(f"{base_url}/models") as response,
    ):
        return response.status


def root(base_url: str) -> str:
    return base_url.partition("/sessions/")[0]


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "", "::", "[::]", "0:0:0:0:0:0:0:0"])
async def test_all_addresses(rollout: RolloutController, tokenizer: Any, host: str) -> None:
    if ":" in host and not HAS_IPV6:
        pytest.skip("the machine has no IPv6")
    with AgentGateway(rollout, tokenizer, host=host) as gateway:
        port = port_of(gateway)
        ways = ["127.0.0.1", "localhost"]
        if HAS_IPV6 and (":" in host or not host):
            ways.append("[::1]")
        for way in ways:
            url = f"http://{way}:{port}"
            assert root(await opened(gateway, url)) == url
        with gateway.session() as session:
            assert root(session.base_url) == gateway.url
            assert urlsplit(gateway.url).hostname not in ("0.0.0.0", "::", "", None)
            assert session.environment["ANTHROPIC_BASE_URL"].startswith(gateway.url)
            assert await models(session.base_url, session.key) == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
async def test_one_address(rollout: RolloutController, tokenizer: Any, host: str) -> None:
    if ":" in host and not HAS_IPV6:
        pytest.skip("the machine has no IPv6")
    with AgentGateway(rollout, tokenizer, host=host) as gateway:
        shown = "[::1]" if ":" in host else host
        assert gateway.url == f"http://{shown}:{port_of(gateway)}"
        with gateway.session() as session:
            assert root(session.base_url) == gateway.url
            assert await models(session.base_url, session.key) == 200
        assert root(await opened(gateway, gateway.url)) == gateway.url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("driver", "http://driver"),
        ("trainer_1.cluster.local:8100", "http://trainer_1.cluster.local:8100"),
        ("[fd00::2]:8100", "http://[fd00::2]:8100"),
        ("192.0.2.7:9", "http://192.0.2.7:9"),
        # Not the address of a server: that of the connection is used.
        ("0.0.0.0:8100", ""),
        ("[::]:8100", ""),
        ("[::ffff:0.0.0.0]:8100", ""),
        ("[fe80::1%eth0]:80", ""),
        ("driver:0", ""),
        ("driver:port", ""),
        ("driver/evil", ""),
        ("driver?a", ""),
        ("user@driver", ""),
        ("a b", ""),
        ("[driver", ""),
        ("", ""),
    ],
)
async def test_host_header(gateway: AgentGateway, host: str, url: str) -> None:
    port = port_of(gateway)
    expected = url or f"http://127.0.0.1:{port}"
    assert root(await opened(gateway, f"http://127.0.0.1:{port}", Host=host)) == expected


async def test_no_host_header(gateway: AgentGateway) -> None:
    raw = await raw_answer(gateway, f"POST /sessions HTTP/1.0\r\nx-api-key: {gateway.key}\r\n\r\n")
    assert f'"http://127.0.0.1:{port_of(gateway)}/sessions/' in raw


async def raw_answer(gateway: AgentGateway, request: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
    writer.write(request.encode())
    found = (await reader.read(1 << 16)).decode()
    if "\r\n\r\n" in found and found.endswith("\r\n\r\n"):
        found += (await reader.read(1 << 16)).decode()
    writer.close()
    return found


async def test_forwarded_headers_are_ignored(gateway: AgentGateway) -> None:
    sent = {
        "X-Forwarded-Host": "proxy.example.org",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Port": "443",
        "Forwarded": "host=proxy.example.org;proto=https",
    }
    url = f"http://127.0.0.1:{port_of(gateway)}"
    assert root(await opened(gateway, url, **sent)) == url


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
async def test_upgrade_is_ignored(gateway: AgentGateway, upgrade: str) -> None:
    with gateway.session() as session:
        head = (
            f"GET /sessions/{session.id}/v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
            f"Upgrade: {upgrade}\r\nx-api-key: {session.key}\r\n\r\n"
        )
        assert (await raw_answer(gateway, head)).startswith("HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("https://agents.example.org", "https://agents.example.org"),
        ("https://agents.example.org/", "https://agents.example.org"),
        ("https://agents.example.org:8443/rl/run-7/", "https://agents.example.org:8443/rl/run-7"),
        ("http://10.0.0.7:8100", "http://10.0.0.7:8100"),
        ("http://[fd00::2]:8100/", "http://[fd00::2]:8100"),
        ("HTTP://driver", "HTTP://driver"),
    ],
)
async def test_public_url(rollout: RolloutController, tokenizer: Any, given: str, url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = AgentGateway(rollout, tokenizer, host="0.0.0.0", port=port, public_url=given)
    with made as gateway:
        gateway.initialize()
        assert gateway.url == url
        base_url = await opened(gateway, f"http://127.0.0.1:{port}", Host="other")
        assert root(base_url) == url
        with gateway.session() as session:
            assert session.base_url == f"{url}/sessions/{session.id}/v1"
            assert session.environment["HELMSMAN_SESSION_URL"] == f"{url}/sessions/{session.id}"


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("", "does not begin with http:// or https://"),
        ("agents.example.org", "does not begin with http"),
        ("localhost:8100", "does not begin with http"),
        ("ws://driver:8100", "does not begin with http"),
        ("http://", "has no valid host"),
        ("http:///rl", "has no valid host"),
        ("http://:8100", "has no valid host"),
        ("http://a,b", "has no valid host"),
        ("http://fd00::2:8100", "is malformed"),
        ("http://[fd00::2", "is malformed"),
        ("http://0.0.0.0:8100", "has 0.0.0.0, which is an address to listen on"),
        ("http://[::]:8100", "has ::, which is an address to listen on"),
        ("http://driver:port", "is malformed"),
        ("http://driver:70000", "is malformed"),
        ("http://driver:0", "has no valid port"),
        ("http://driver:", "has no valid port"),
        ("http://driver/?a=1", "has a query or a fragment"),
        ("http://driver/#a", "has a query or a fragment"),
        ("http://dri ver", "is not a text of ASCII without spaces"),
        ("http://driver\n", "is not a text of ASCII without spaces"),
        ("http://bücher.example", "is not a text of ASCII without spaces"),
        (8100, "is not a text of ASCII without spaces"),
        (True, "is not a text of ASCII without spaces"),
    ],
)
def test_invalid_public_url(
    rollout: RolloutController, tokenizer: Any, url: Any, fault: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        AgentGateway(rollout, tokenizer, public_url=url)
    message = str(caught.value)
    assert message.startswith(f"invalid setting (public_url): {url!r} {fault}")
    assert message.endswith("Give the URL by which agents reach the gateway, or None")


def test_invalid_public_url_hides_password(rollout: RolloutController, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"'https://\.\.\.@driver' has a user name"):
        AgentGateway(rollout, tokenizer, public_url="https://me:secret@driver")


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no.such.host.invalid", 0), ("a..b", 0), ("", 70_000)]
)
def test_cannot_listen(rollout: RolloutController, tokenizer: Any, host: str, port: int) -> None:
    gateway = AgentGateway(rollout, tokenizer, host=host, port=port)
    with pytest.raises(OSError, match="the gateway cannot listen") as caught:
        gateway.initialize()
    gateway.close()
    assert f"(host {host!r}, port {port}): " in str(caught.value)
    assert str(caught.value).endswith("Correct host, or use port 0")


async def post(url: str, key: str, data: bytes) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers={"x-api-key": key}) as client,
        client.post(url, data=data) as response,
    ):
        return response.status, await response.json(content_type=None)


def deep(num: int, make: Any = lambda inner: [inner]) -> Any:
    found: Any = 1
    for _ in range(num):
        found = make(found)
    return found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "more",
    [
        {"metadata": {LONE: LONE}},
        {"user": LONE},
        {"stop": LONE, "stop_sequences": [LONE]},
        {"instructions": LONE, "system": LONE},
        {"seed": 10**400, "temperature": -(1 << 70)},
        {"temperature": 1e308, "top_p": 5e-324},
        {"metadata": {"a": deep(150), "b": deep(150, lambda inner: {"a": inner})}},
        {"metadata": {"": [], "\0": "\0\u2028😀"}},
    ],
)
async def test_json_is_answered(gateway: AgentGateway, path: str, more: dict[str, Any]) -> None:
    with gateway.session() as session:
        data = json.dumps({**BODIES[path], **more}).encode()
        status, found = await post(f"{session.base_url}/{path}", session.key, data)
        assert status == 200, found
        assert session.num_turns == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_lone_surrogates_in_a_chat(gateway: AgentGateway, stream: bool) -> None:
    call = {"id": LONE, "function": {"name": LONE, "arguments": json.dumps({LONE: LONE})}}
    messages = [
        {"role": "system", "content": LONE},
        {"role": "user", "content": [{"type": "text", "text": f"a{LONE}\udc00\udfff"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "\udc00", "tool_call_id": LONE},
    ]
    tool = {"function": {"name": LONE, "description": LONE, "parameters": {LONE: LONE}}}
    body = {"messages": messages, "tools": [tool], "stream": stream}
    with gateway.session() as session:
        async with (
            aiohttp.ClientSession(headers={"x-api-key": session.key}) as client,
            client.post(f"{session.base_url}/chat/completions", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            assert await response.text()
        data = json.dumps(CHAT | {"user": LONE}, ensure_ascii=False)
        url = f"{session.base_url}/chat/completions"
        status, found = await post(url, session.key, data.encode("utf-8", "surrogatepass"))
        assert status == 200, found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"temperature": math.nan}, "the body is not JSON: NaN is not a finite number. Send null"),
        ({"metadata": [math.inf]}, "Infinity is not a finite number. Send null instead"),
        ({"metadata": {"a": -math.inf}}, "-Infinity is not a finite number. Send null instead"),
        ({"metadata": deep(250)}, "the body is not JSON of at most 200 levels"),
        ({"metadata": deep(900)}, "the body is not JSON of at most 200 levels"),
        ({LONE: 1}, "'\\ud800' has a lone surrogate, which only a text in the chat may have"),
        ({"messages": [{"role": LONE, "content": "a"}], "input": [{"role": LONE}]}, "role is"),
        ({"stream": LONE}, "'\\ud800' has a lone surrogate"),
    ],
)
async def test_json_is_refused(
    gateway: AgentGateway, path: str, more: dict[str, Any], reason: str
) -> None:
    with gateway.session() as session:
        data = json.dumps({**BODIES[path], **more}).encode()
        status, found = await post(f"{session.base_url}/{path}", session.key, data)
        assert (status, session.num_turns) == (400, 0)
        assert reason in found["error"]["message"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1" * 5000, "the body is not JSON: Exceeds the limit (4300 digits) for integer"),
        ("1e400", "the body is not JSON: 1e400 is not a finite number. Send null instead"),
        ("[" * 100_000, "the body is not JSON of at most 200 levels"),
        ("'a'", "the body is not JSON: Expecting value"),
    ],
)
async def test_texts_that_are_refused(gateway: AgentGateway, text: str, reason: str) -> None:
    with gateway.session() as session:
        data = f'{{"messages": [{{"role": "user", "content": "a"}}], "user": {text}}}'.encode()
        url = f"{session.base_url}/chat/completions"
        status, found = await post(url, session.key, data)
        assert status == 400
        assert found["error"]["message"].startswith(reason)


async def test_arguments_of_deep_json(gateway: AgentGateway) -> None:
    for num in (150, 400, 900, 5000):
        arguments = '{"a": ' + "[" * num + "]" * num + "}"
        call = {"id": "a", "function": {"name": "look", "arguments": arguments}}
        asked = [
            *CHAT["messages"],
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "b", "tool_call_id": "a"},
        ]
        with gateway.session() as session:
            data = json.dumps({"messages": asked}).encode()
            url = f"{session.base_url}/chat/completions"
            status, found = await post(url, session.key, data)
            assert status in ((200,) if num == 150 else (200, 400)), found


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": LONE, LONE: [1 << 70, None, 0.5], "deep": deep(150)},
        {"a": -(1 << 64)},
        {"helmsman:json": "not JSON"},
        {},
    ],
)
async def test_metadata_of_any_json(
    rollout: RolloutController, tokenizer: Any, tmp_path: Path, metadata: dict[str, Any]
) -> None:
    path = tmp_path / "sessions.sqlite"
    with AgentGateway(rollout, tokenizer, journal=path) as gateway:
        gateway.initialize()
        data = json.dumps({"name": LONE}).encode()
        status, found = await post(f"{gateway.url}/sessions", gateway.key, data)
        assert status == 400
        assert found["error"]["param"] == "name"
        assert found["error"]["message"].startswith("the session's name is '\\ud800', which has")
        data = json.dumps({"name": "a", "metadata": metadata}).encode()
        status, found = await post(f"{gateway.url}/sessions", gateway.key, data)
        assert status == 200
        url = found["base_url"].removesuffix("/v1") + "/finish"
        status, _ = await post(url, found["api_key"], b'{"reward": 1}')
        assert status == 200
        assert [each.metadata for each in await gateway.collect(1)] == [metadata]
    with AgentGateway(rollout, tokenizer, journal=path) as gateway:
        assert [each.metadata for each in await gateway.collect(1)] == [metadata]
