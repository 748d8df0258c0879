"""The vendors' SDKs and real agents, unchanged, in sessions of several turns with tools."""

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
from tests.agents.toy_model import SECRETS, question

NUM_SESSIONS = 2 * int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "5"))
"""`make soak` runs 100 sessions of each agent."""
MAX_TURNS = 6
TOOL = {
    "name": "look",
    "description": "Look for something.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
}


async def chat_completions(session: AgentSession, number: int) -> int:
    openai = pytest.importorskip("openai")
    calls = 0
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
        messages: list[Any] = [{"role": "user", "content": question(number)}]
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}]
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
    openai = pytest.importorskip("openai")
    calls = 0
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
        messages: list[Any] = [{"role": "user", "content": question(number)}]
        for _ in range(MAX_TURNS):
            tool = {"type": "function", "function": {**TOOL, "strict": True}}
            async with client.chat.completions.stream(
                model="policy", messages=messages, tools=[tool]
            ) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message)
            for call in message.tool_calls or []:
                result = SECRETS[number % 4]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                calls += 1
            if not message.tool_calls:
                break
    return calls


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


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "agent", [chat_completions, streamed_chat_completions, responses, messages, langgraph]
)
async def test_sessions_of_an_sdk(
    gateway: AgentGateway, agent: Callable[[AgentSession, int], Coroutine[Any, Any, int]]
) -> None:
    calls = 0
    forks: Counter[str] = Counter()

    async def one(number: int) -> int:
        with gateway.session(seed=number) as session:
            made = await agent(session, number)
        samples = session.samples()
        # The agent sends everything back: the session is one sample, however many turns it has.
        assert len(samples) == 1, session.forks
        assert len(samples[0].turn_ends) == session.num_turns
        forks.update(session.forks)
        return made

    for begin in range(0, NUM_SESSIONS, 10):
        calls += sum(await asyncio.gather(*map(one, range(begin, begin + 10))))
    assert calls > 0
    assert not forks


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.asyncio
async def test_sessions_of_a_coding_agent(gateway: AgentGateway, tmp_path: Path) -> None:
    pytest.importorskip("minisweagent")
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    statuses: Counter[str] = Counter()
    num_turns = 0
    for number in range(NUM_SESSIONS):
        if NUM_SESSIONS == 10 and num_turns > number > 1:
            break  # a session had several turns; they take seconds each
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
                cwd=tmp_path,
                timeout=120,
            )
        statuses[result.output.split()[-1]] += 1
        num_turns += session.num_turns
        assert sum(sum(sample.loss_mask) for sample in session.samples()) > 0
    known = {"Submitted", "LimitsExceeded", "RepeatedFormatError"}
    assert statuses.keys() <= known, statuses
    assert statuses["Submitted"] >= 1
    assert num_turns > sum(statuses.values())
