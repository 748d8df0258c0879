"""Cost of a turn through an AgentGateway, and memory of idle sessions.

The engine answers at once, so the figures are the gateway's: HTTP, the chat template, the tree of
tokens and the request to the rollout, with a client in the same process.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Pair, case
from benchmarks.world import World
from helmsman import InlineScheduler, Job, RolloutController
from helmsman.agents import AgentGateway, AgentSession
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.recipes import make_model

NUM_OPEN, NUM_IDLE = 1000, 10_000
TURN_LIMIT_MS, IDLE_LIMIT_MB = 5.0, 200.0
TURNS = 200
NUM_NEW = 40
"""Tokens of an answer."""
_TEXT = " and then ".join(["some words that a user or a tool returns"] * 5)


class Constant:
    """A rollout engine that answers at once."""

    def initialize(self) -> None:
        return

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        ids = [random.randrange(10, 60) for _ in range(NUM_NEW)]
        return GenerationResult(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=[-1.0] * NUM_NEW,
            versions=[0] * NUM_NEW,
            stop_reason="length",
        )

    async def abort(self, request_ids: Any) -> None:
        return


def _gateway(world: World, num_sessions: int, num_turns: int) -> list[AgentSession]:
    """Open sessions and take turns in each, with a question of 200 characters each."""
    scheduler = world.until_case_ends.enter_context(InlineScheduler())
    rollout = world.until_case_ends.enter_context(
        RolloutController(scheduler, Constant, Job(role="rollout"))
    )
    folder = world.until_case_ends.enter_context(tempfile.TemporaryDirectory())
    model = make_model(Path(folder), num_layers=1, width=16)
    gateway = world.until_case_ends.enter_context(AgentGateway(rollout, model))
    sessions = [gateway.session() for _ in range(num_sessions)]

    async def take_turns(session: AgentSession) -> None:
        messages: list[Any] = []
        for _ in range(num_turns):
            messages.append({"role": "user", "content": _TEXT})
            messages.append(await session.complete(messages))
        session.metadata["messages"] = messages if num_sessions <= NUM_OPEN else []

    async def fill() -> None:
        for begin in range(0, num_sessions, 50):
            await asyncio.gather(*map(take_turns, sessions[begin : begin + 50]))

    asyncio.run(fill())
    return sessions


@case("agents.turn_1000", unit="ms", floor=f"limit of {TURN_LIMIT_MS:g} ms", goal="<= 1")
def turn(world: World) -> Pair:
    sessions = itertools.cycle(_gateway(world, NUM_OPEN, 4))
    first = next(sessions)
    host = first.base_url.split("/")[2]
    client = http.client.HTTPConnection(host)
    world.until_case_ends.callback(client.close)

    def take_turns() -> None:
        for session in itertools.islice(sessions, TURNS):
            messages = [*session.metadata["messages"], {"role": "user", "content": _TEXT}]
            body = json.dumps({"messages": messages})
            path = session.base_url.partition(host)[2] + "/chat/completions"
            client.request("POST", path, body, {"x-api-key": session.key})
            assert client.getresponse().read()

    return Pair(ours=take_turns, floor=TURN_LIMIT_MS, per_run=TURNS, rounds=5)


@case("agents.idle_10000", unit="MB", floor=f"limit of {IDLE_LIMIT_MB:g} MB", goal="<= 1")
def idle(world: World) -> Pair:
    process = psutil.Process()

    _gateway(world, 1, 1)  # imports torch and transformers

    def memory() -> float:
        before = process.memory_info().rss
        sessions = _gateway(world, NUM_IDLE, 2)
        grown = process.memory_info().rss - before
        for session in sessions:
            session.close(is_complete=False)
        return grown / 1e6

    return Pair(ours=memory, floor=IDLE_LIMIT_MB, rounds=1, warm_up=0, returns_figure=True)
