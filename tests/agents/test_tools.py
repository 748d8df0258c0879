"""Test ToolLoop with Python functions in processes of their own, and with an MCP server."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from helmsman.agents import AgentGateway, FunctionTools, McpTools, ToolLoop
from tests.agents.toy_model import SECRETS, question


def look(key: str) -> str:
    """Look for something.

    Args:
        key: Where to look.
    """
    return SECRETS[0] if key == "a" else "nothing"


def hang(key: str) -> str:
    """Never return.

    Args:
        key: Ignored.
    """
    time.sleep(3600)
    return key


def die(key: str) -> str:
    """End the process.

    Args:
        key: Ignored.
    """
    os.kill(os.getpid(), signal.SIGKILL)
    return key


def fail(key: str) -> str:
    """Raise an error.

    Args:
        key: Part of the error.
    """
    raise KeyError(key)


def undescribed(key):  # type: ignore[no-untyped-def]
    return key


@pytest.mark.asyncio
async def test_tool_loop_answers(gateway: AgentGateway) -> None:
    answers, num_calls = [], 0
    async with ToolLoop([look], system="Be brief.", max_turns=4) as loop:
        for number in range(8):
            with gateway.session(seed=number) as session:
                answers.append(await loop.run(session, question(number)))
                (sample,) = session.samples()
            num_calls += len(sample.turn_ends) - 1
    assert num_calls > 0
    assert any(each is not None for each in answers)


@pytest.mark.asyncio
async def test_function_tools_failures_are_results() -> None:
    async with FunctionTools([look, hang, die, fail], timeout=1.0, num_processes=1) as tools:
        assert await tools.call("look", {"key": "a"}) == SECRETS[0]
        assert await tools.call("hang", {"key": "a"}) == "Error: hang did not end within 1 s"
        assert "die ended its process" in await tools.call("die", {"key": "a"})
        assert await tools.call("fail", {"key": "b"}) == "Error: KeyError: 'b'"
        assert "Error: TypeError" in await tools.call("look", {"wrong": "a"})
        assert await tools.call("look", {"key": "b"}) == "nothing"


def test_function_tools_without_description() -> None:
    with pytest.raises(ValueError, match="cannot be described to the model"):
        FunctionTools([undescribed])


SERVER = """
from mcp.server import MCPServer

server = MCPServer("test")

@server.tool()
def look(key: str) -> str:
    "Look for something."
    return "north" if key == "a" else "nothing"

@server.tool()
def fail(key: str) -> str:
    raise ValueError(key)

server.run()
"""


@pytest.mark.asyncio
async def test_mcp_tools(gateway: AgentGateway, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    server = McpTools(f"{sys.executable} {program}")
    async with ToolLoop([server], max_turns=3) as loop:
        assert server.names == ["look", "fail"]
        assert await server.call("look", {"key": "a"}) == "north"
        assert (await server.call("fail", {"key": "x"})).startswith("Error: ")
        with gateway.session(seed=1) as session:
            await loop.run(session, question(1))
        assert session.num_turns >= 1


@pytest.mark.asyncio
async def test_tool_loop_two_tools_of_one_name() -> None:
    async def enter() -> None:
        async with ToolLoop([FunctionTools([look]), FunctionTools([look])]):
            pass

    with pytest.raises(ValueError, match="two tools are called 'look'"):
        await enter()
