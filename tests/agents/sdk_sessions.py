"""The SDKs of vendors and real agents, unchanged, in sessions of several turns with tools."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from helmsman.agents import AgentGateway, AgentSession, SessionLimits, run_program
from tests.agents.toy_model import CHAT_TOOL, SECRETS, TOOL, question

NUM_SESSIONS = 2 * int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "5"))
"""Sessions of each agent."""
MAX_TURNS = 6


async def chat_completions(session: AgentSession, number: int, streams: bool = False) -> int:
    openai = pytest.importorskip("openai")
    calls = 0
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
        messages: list[Any] = [{"role": "user", "content": question(number)}]
        for _ in range(MAX_TURNS):
            if streams:
                strict = {"type": "function", "function": {**TOOL, "strict": True}}
                async with client.chat.completions.stream(
                    model="policy", messages=messages, tools=[strict]
                ) as stream:
                    answer = await stream.get_final_completion()
            else:
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[CHAT_TOOL]
                )
            message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or []:
                assert isinstance(json.loads(call.function.arguments), dict)
                result = SECRETS[number % 4]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                calls += 1
            if not message.tool_calls:
                break
    return calls


async def streamed_chat_completions(session: AgentSession, number: int) -> int:
    return await chat_completions(session, number, streams=True)


async def responses(session: AgentSession, number: int) -> int:
    openai = pytest.importorskip("openai")
    calls = 0
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
        items: Any = question(number)
        previous = openai.omit
        for _ in range(MAX_TURNS):
            answer = await client.responses.create(
                model="policy",
                input=items,
                previous_response_id=previous,
                tools=[{"type": "function", "strict": False, **TOOL}],
            )
            previous = answer.id
            items = [
                {
                    "type": "function_call_output",
                    "call_id": each.call_id,
                    "output": SECRETS[number % 4],
                }
                for each in answer.output
                if each.type == "function_call"
            ]
            calls += len(items)
            if not items:
                break
    return calls


async def messages(session: AgentSession, number: int) -> int:
    anthropic = pytest.importorskip("anthropic")
    calls = 0
    # The same base_url as for OpenAI's SDK.
    async with anthropic.AsyncAnthropic(base_url=session.base_url, api_key=session.key) as client:
        chat: list[Any] = [{"role": "user", "content": question(number)}]
        for _ in range(MAX_TURNS):
            answer = await client.messages.create(
                model="policy",
                max_tokens=8,
                messages=chat,
                tools=[{"name": "look", "input_schema": TOOL["parameters"]}],
            )
            chat.append({"role": "assistant", "content": answer.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": [{"type": "text", "text": SECRETS[number % 4]}],
                }
                for block in answer.content
                if block.type == "tool_use"
            ]
            calls += len(results)
            if not results:
                break
            chat.append({"role": "user", "content": results})
    return calls


async def langgraph(session: AgentSession, number: int) -> int:
    graph = pytest.importorskip("langgraph.graph")
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    models = pytest.importorskip("langchain_openai")
    found: list[str] = []

    def look(key: str) -> str:
        """Look for something."""
        found.append(key)
        return SECRETS[number % 4]

    model = models.ChatOpenAI(
        model="policy", base_url=session.base_url, api_key=session.key
    ).bind_tools([look])

    async def call(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    made = graph.StateGraph(graph.MessagesState)
    made.add_node("model", call)
    made.add_node("tools", prebuilt.ToolNode([look]))
    made.add_edge(graph.START, "model")
    made.add_conditional_edges("model", prebuilt.tools_condition)
    made.add_edge("tools", "model")
    agent = made.compile()
    errors = pytest.importorskip("langgraph.errors")
    with contextlib.suppress(errors.GraphRecursionError):  # it calls tools until the end
        await agent.ainvoke(
            {"messages": [{"role": "user", "content": question(number)}]},
            {"recursion_limit": 2 * MAX_TURNS},
        )
    return len(found)


Agent = Callable[[AgentSession, int], Coroutine[Any, Any, int]]
AGENTS: list[Agent] = [chat_completions, streamed_chat_completions, responses, messages, langgraph]


async def check_sdk(gateway: AgentGateway, agent: Agent) -> None:
    """Check that each session of an agent is one sample, since the agent sends everything back."""
    calls = 0

    async def one(number: int) -> int:
        with gateway.session(seed=number) as session:
            made = await agent(session, number)
        (sample,) = session.samples()
        assert len(sample.turn_ends) == session.num_turns
        assert not session.forks
        return made

    for begin in range(0, NUM_SESSIONS, 10):
        calls += sum(await asyncio.gather(*map(one, range(begin, begin + 10))))
    assert calls > 0


PROGRAM = """
import os
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name="openai/policy",
    model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"]},
    cost_tracking="ignore_errors",
)
agent = DefaultAgent(
    model,
    LocalEnvironment(),
    system_template="You work in a shell.",
    instance_template="{{task}}",
    step_limit=6,
)
print(agent.run(os.environ["HELMSMAN_TASK"])["exit_status"])
"""


async def check_coding_agent(gateway: AgentGateway, folder: Path) -> None:
    """Check that mini-swe-agent works and submits in sessions of several turns."""
    pytest.importorskip("minisweagent")
    program = folder / "agent.py"
    program.write_text(PROGRAM)
    statuses: Counter[str] = Counter()
    num_turns = 0
    for number in range(NUM_SESSIONS):
        if NUM_SESSIONS == 10 and num_turns > number > 1 and statuses["Submitted"]:
            break  # Each session takes seconds, and there was one of several turns.
        with gateway.session(seed=number, limits=SessionLimits(max_turns=8)) as session:
            result = await run_program(
                [sys.executable, str(program)],
                {
                    **session.environment,
                    "HELMSMAN_TASK": f"run {number}",
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                    "MSWEA_SILENT_STARTUP": "1",
                    "MSWEA_CONFIGURED": "true",
                },
                cwd=folder,
                timeout=120,
            )
        statuses[result.output.split()[-1]] += 1
        num_turns += session.num_turns
        assert sum(sum(sample.loss_mask) for sample in session.samples()) > 0
    known = {"Submitted", "LimitsExceeded", "RepeatedFormatError"}
    assert statuses.keys() <= known, statuses
    assert statuses["Submitted"] >= 1
    assert num_turns > sum(statuses.values())
