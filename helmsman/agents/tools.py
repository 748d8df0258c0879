"""ToolLoop: an agent in a few lines, with Python functions and MCP servers as tools."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helmsman import HelmsmanError, RewardPool
from helmsman.agents._session import AgentSession
from helmsman.api.errors import EngineCallError, RewardLostError, RewardTimeoutError
from helmsman.api.extras import needed_by
from helmsman.api.open_work import Ledger


class Tools(abc.ABC):
    """Tools that a model can call; an async context manager."""

    specs: Sequence[Mapping[str, Any]] = ()
    """Functions in the form of Chat Completions."""

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return [str(each["function"]["name"]) for each in self.specs]

    @abc.abstractmethod
    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool.

        Args:
            name: One of ``names``.
            arguments: Its arguments.

        Returns:
            The result for the model; the text of an error if the call failed.
        """

    async def __aenter__(self) -> Tools:
        return self

    async def __aexit__(self, *_: object) -> None:
        return


class FunctionTools(Tools):
    """Python functions as tools, which run in processes of their own.

    A function that exceeds the limit or ends its process fails alone: the model receives the error
    as the result, and the process is replaced.

    Args:
        functions: Functions with type hints and a docstring in Google's style, from which the
            model's description is made.
        timeout: Limit of a call in seconds.
        num_processes: Number of calls that run at once.

    Raises:
        ValueError: A function has no type hints or no docstring.
        BackendNotInstalledError: transformers is missing.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        timeout: float = 30.0,
        num_processes: int = 2,
    ) -> None:
        with needed_by("the description of a function", "transformers"):
            from transformers.utils import get_json_schema
        try:
            self.specs = [get_json_schema(each) for each in functions]
        except Exception as error:  # transformers may raise any exception
            raise ValueError(f"a function cannot be described to the model: {error}") from error
        self._functions = {each.__name__: each for each in functions}
        self._limit_s, self._num_processes = timeout, num_processes
        self._pool: RewardPool | None = None

    async def __aenter__(self) -> FunctionTools:
        functions = self._functions

        def call(name: str, arguments: dict[str, Any]) -> Any:
            return functions[name](**arguments)

        start = asyncio.ensure_future(
            asyncio.to_thread(
                RewardPool.on_this_machine,
                call,
                self._num_processes,
                self._limit_s,
                max_restarts=1_000_000,
            )
        )
        try:
            self._pool = await asyncio.shield(start)
        except asyncio.CancelledError:
            await asyncio.to_thread((await start).close)
            raise
        self._pool.open_scores.kind = "tool function"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a function in a process of its own; see Tools."""
        assert self._pool is not None, "FunctionTools is used outside of its `async with`"
        try:
            found = await self._pool.async_score(name, dict(arguments))
        except RewardTimeoutError as error:
            return f"Error: {name} did not end within {error.limit_s:g} s"
        except RewardLostError as error:
            return f"Error: {name} ended its process: {error.reason}"
        except EngineCallError as error:
            return f"Error: {error.remote_type}: {error.remote_message}"
        return (
            found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
        )


class McpTools(Tools):
    """The tools of an MCP server.

    Args:
        server: A command such as ``"uvx my-server --flag"``, the URL of a server, or a server of
            the package ``mcp``.
        timeout: Limit of a call in seconds.

    Raises:
        BackendNotInstalledError: The package ``mcp`` is missing; on entry.
    """

    def __init__(self, server: Any, *, timeout: float = 30.0) -> None:
        self._server, self._limit_s = server, timeout
        self._held = contextlib.AsyncExitStack()
        self._client: Any = None

    async def __aenter__(self) -> McpTools:
        with needed_by("McpTools", "mcp"):
            import mcp

        server = self._server
        if isinstance(server, str) and "://" not in server:
            command, *arguments = shlex.split(server)
            server = mcp.StdioServerParameters(command=command, args=arguments)
        client: Any = mcp.Client(server, read_timeout_seconds=self._limit_s)
        async with contextlib.AsyncExitStack() as held:
            self._client = await held.enter_async_context(client)
            page = await self._client.list_tools()
            tools = list(page.tools)
            while page.next_cursor:
                page = await self._client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            self.specs = [
                {
                    "type": "function",
                    "function": {
                        "name": each.name,
                        "description": each.description or "",
                        "parameters": each.input_schema,
                    },
                }
                for each in tools
            ]
            self._held = held.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.aclose()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the server; see Tools."""
        try:
            async with asyncio.timeout(self._limit_s):
                result = await self._client.call_tool(name, dict(arguments))
        except TimeoutError:
            return f"Error: {name} did not end within {self._limit_s:g} s"
        except Exception as error:  # noqa: BLE001 - a server's failure is a result for the model
            return f"Error: {error}"
        text = "\n".join(str(part.text) for part in result.content if hasattr(part, "text"))
        return f"Error: {text}" if result.is_error else text


class ToolLoop:
    """Runs a model with tools: the model calls them until it answers in text.

        async with ToolLoop([add, search]) as loop:
            with gateway.session() as session:
                answer = await loop.run(session, "What is 17 + 25?")

    Args:
        tools: Python functions, and other Tools such as McpTools.
        system: System prompt; None for none.
        max_turns: Maximum turns of the model.
        timeout: Limit of a call of a Python function in seconds.
        num_processes: Number of Python functions that run at once.

    Raises:
        ValueError: Two tools have the same name, or a function cannot be described.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tools],
        *,
        system: str | None = None,
        max_turns: int = 16,
        timeout: float = 30.0,
        num_processes: int = 2,
    ) -> None:
        functions = [each for each in tools if not isinstance(each, Tools)]
        self._sources = [each for each in tools if isinstance(each, Tools)]
        if functions:
            made = FunctionTools(functions, timeout=timeout, num_processes=num_processes)
            self._sources.insert(0, made)
        self._system, self._max_turns = system, max_turns
        self._held = contextlib.AsyncExitStack()
        self._by_name: dict[str, Tools] = {}
        self._calls = Ledger[object]("tool call", type(self).__name__)

    async def __aenter__(self) -> ToolLoop:
        by_name: dict[str, Tools] = {}
        async with contextlib.AsyncExitStack() as held:
            for source in self._sources:
                await held.enter_async_context(source)
                for name in source.names:
                    if name in by_name:
                        raise ValueError(f"two tools are called {name!r}; rename one")
                    by_name[name] = source
            self._held, self._by_name = held.pop_all(), by_name
        return self

    async def __aexit__(self, *_: object) -> None:
        self._by_name = {}
        await self._held.aclose()

    async def run(
        self, session: AgentSession, prompt: str | Sequence[Mapping[str, Any]]
    ) -> str | None:
        """Run until the model answers without a tool call.

        Args:
            session: The session in which the model is used.
            prompt: A question, or messages in the form of Chat Completions.

        Returns:
            The answer; None if the model still called tools in its last turn.

        Raises:
            BadRequestError: The chat is invalid, or a limit of the session is reached.
            HelmsmanError: The model is not available, or the loop is not entered.
        """
        if len(self._by_name) == 0 and self._sources:
            raise HelmsmanError("the ToolLoop is not entered; use it in `async with`")
        messages: list[Mapping[str, Any]] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        specs = [spec for source in self._sources for spec in source.specs]
        for _ in range(self._max_turns):
            message = await session.complete(messages, tools=specs)
            messages.append(message)
            calls = message.get("tool_calls")
            if not calls:
                return str(message["content"])
            results = await asyncio.gather(*(self._call(each["function"]) for each in calls))
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, results, strict=True)
            ]
        return None

    async def _call(self, function: Mapping[str, Any]) -> str:
        name = function["name"]
        source = self._by_name.get(name)
        if source is None:
            return f"Error: there is no tool {name!r}; the tools are {', '.join(self._by_name)}"
        call = object()
        self._calls.begin(call, f"{name}({function['arguments']})", asyncio.current_task())
        try:
            return await source.call(name, json.loads(function["arguments"]))
        except HelmsmanError as error:
            return f"Error: {error}"
        finally:
            self._calls.end(call)
