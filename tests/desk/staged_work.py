"""Runs with a hung or a healthy episode, session, tool or reward: ``python staged_work.py KIND``.

It prints the id of the run once its work is open, and never ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from helmsman import (
    BoundedStaleness,
    Job,
    LocalScheduler,
    RewardPool,
    RolloutController,
    SamplingParams,
    SchedulingSpec,
    WorkflowExecutor,
)
from helmsman.agents import AgentGateway, ToolLoop, Tools, run_program

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.agents.constant_model import Constant, plain_tokenizer

HUNG = 5
"""The item whose episode hangs."""
CPU = SchedulingSpec(cpu=0.2)


class Idle:
    """An engine without methods."""


class Closed(BoundedStaleness):
    """A batch policy that admits the episodes of one batch."""

    def admit(self, state: Any) -> int:
        return 0 if state.num_used else super().admit(state)


@contextlib.contextmanager
def run() -> Iterator[LocalScheduler]:
    with LocalScheduler(preload=()) as scheduler:
        ids = scheduler.create_workers(Job(role="actor", tasks=[CPU]))
        scheduler.create_engines(ids, Idle)
        yield scheduler


def ready(scheduler: LocalScheduler) -> None:
    print(f"run {scheduler.run_id}", flush=True)


def episodes(workflow: Callable[[int], Awaitable[Any]], **options: Any) -> None:
    """Ask for a batch of which one episode hangs."""

    async def episode(item: int) -> Any:
        return await workflow(item) if item == HUNG else item

    with run() as scheduler, WorkflowExecutor(episode, **options) as executor:
        ready(scheduler)
        executor.prepare_batch(itertools.count(), 8)
        time.sleep(3600)


async def event(_: int) -> None:
    done = asyncio.Event()
    await done.wait()


async def lock(_: int) -> None:
    mutex = asyncio.Lock()
    await mutex.acquire()
    async with mutex:
        pass


async def sleep(_: int) -> None:
    await asyncio.sleep(1e9)


async def queue(_: int) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.Queue[int]().get())


async def process(_: int) -> None:
    child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    await child.wait()


async def polling(_: int) -> None:
    while not Path("/nowhere/at/all").exists():  # noqa: ASYNC110 - polling is the fault
        await asyncio.sleep(0.1)


def read_forever() -> bytes:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        return peer.recv(1)


async def failed_task(_: int) -> None:
    done = asyncio.Event()

    async def finish() -> None:
        raise RuntimeError("it never sets the event")

    task = asyncio.create_task(finish())
    await done.wait()
    await task


async def thread(_: int) -> None:
    await asyncio.to_thread(read_forever)


async def blocking(_: int) -> None:
    time.sleep(1e9)  # noqa: ASYNC251 - it blocks the event loop


def count_up(number: int) -> int:
    while number:
        number += 1
    return number


async def spinning(_: int) -> None:
    await asyncio.to_thread(count_up, 1)


def reward() -> None:
    with (
        run() as scheduler,
        RewardPool(scheduler, count_up, Job(role="reward", tasks=[CPU])) as pool,
    ):
        pool.initialize()

        async def rated(item: int) -> Any:
            return await pool(item)

        with WorkflowExecutor(rated) as executor:
            executor.rollout_batch([0, 0, 0])
            ready(scheduler)
            executor.rollout_batch([1])


def own_reward() -> None:
    """A pool with a scheduler of its own, and a call without an episode."""
    with run() as scheduler, RewardPool.on_this_machine(_read, 1) as pool:
        ready(scheduler)
        pool.score(1)


def _read(_: int) -> bytes:
    return read_forever()


@contextlib.contextmanager
def gateway() -> Iterator[tuple[LocalScheduler, RolloutController, AgentGateway]]:
    with (
        run() as scheduler,
        RolloutController(scheduler, Constant, Job(role="rollout", tasks=[CPU])) as rollout,
        AgentGateway(rollout, plain_tokenizer(), sampling=SamplingParams(max_new_tokens=4)) as made,
    ):
        yield scheduler, rollout, made


def outside_agent() -> None:
    """One session of an outside agent never ends."""
    with gateway() as (scheduler, _, made):
        for number in range(3):
            session = _post(f"{made.url}/sessions", made.key, b"{}")
            if number:
                _post(f"{made.url}/sessions/{session['id']}/finish", session["api_key"], b"{}")
        ready(scheduler)
        asyncio.run(made.collect(3))


def no_agents() -> None:
    with gateway() as (scheduler, _, made):
        ready(scheduler)
        asyncio.run(made.collect(3))


def _post(url: str, key: str, body: bytes) -> Any:
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def turn() -> None:
    """The rollout is paused, so that a session's turn waits."""
    with gateway() as (scheduler, rollout, made):

        async def chat(_: int) -> None:
            async with made.session() as session:
                await session.complete([{"role": "user", "content": "a"}])

        with WorkflowExecutor(chat) as executor:
            executor.rollout_batch(range(3))
            rollout.pause()
            ready(scheduler)
            executor.rollout_batch([1])


class Silent(Tools):
    """A tool without an answer."""

    specs = ({"type": "function", "function": {"name": "ask", "parameters": {}}},)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        await asyncio.Event().wait()
        return name


class Asker:
    """A session whose model calls the tool."""

    async def complete(self, *_: Any, **__: Any) -> dict[str, Any]:
        function = {"name": "ask", "arguments": '{"whom": "no one"}'}
        return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


async def tool(_: int) -> None:
    asker: Any = Asker()
    async with ToolLoop([Silent()]) as loop:
        await loop.run(asker, "ask")


def program() -> None:
    """An agent's program that takes turns by HTTP, for longer than all limits: healthy."""
    code = (
        "import json, os, time, urllib.request as u\n"
        "while True:\n"
        "    time.sleep(2)\n"
        "    body = json.dumps({'messages': [{'role': 'user', 'content': 'a'}]}).encode()\n"
        "    headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'],"
        " 'Content-Type': 'application/json'}\n"
        "    url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "    u.urlopen(u.Request(url, body, headers)).read()\n"
    )
    with gateway() as (scheduler, _, made):

        async def solve(_: int) -> None:
            async with made.session() as session:
                await run_program([sys.executable, "-c", code], session.environment, timeout=600)

        with WorkflowExecutor(solve) as executor:
            ready(scheduler)
            executor.rollout_batch([1])


async def agent_of_session(made: AgentGateway) -> None:
    async with made.session("chat-7") as session:
        await session.complete([{"role": "user", "content": "a"}])
        await asyncio.Event().wait()  # such as its user's answer


def session() -> None:
    with gateway() as (scheduler, _, made):
        ready(scheduler)
        asyncio.run(agent_of_session(made))


def nothing_admitted() -> None:
    """A batch for which the policy starts no episode."""

    async def episode(item: int) -> int:
        return item

    with run() as scheduler, WorkflowExecutor(episode, batch_policy=Closed()) as executor:
        source = iter(itertools.count())
        executor.prepare_batch(source, 2)
        ready(scheduler)
        executor.prepare_batch(source, 2)


def blocking_source() -> None:
    """A source of items that blocks, while an episode runs."""

    def items() -> Iterator[int]:
        yield HUNG
        time.sleep(1e9)

    with run() as scheduler, WorkflowExecutor(event) as executor:
        ready(scheduler)
        executor.prepare_batch(items(), 8)


async def progressing(_: int) -> None:
    """Take a step twice a second, for longer than all limits."""
    for step in range(10_000):
        await _step(step)


async def _step(step: int) -> int:
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.5, done.set_result, step)
    return await done


async def downloading(_: int) -> None:
    """Read a few bytes a second in one line of a thread, for longer than all limits."""
    await asyncio.to_thread(_download)


def _download() -> None:
    ours, theirs = socket.socketpair()
    threading.Thread(target=_upload, args=(theirs,), daemon=True).start()
    while ours.recv(1):
        pass


def _upload(peer: socket.socket) -> None:
    while True:
        time.sleep(0.3)
        peer.send(b"x")


async def first(_: int) -> None:
    await asyncio.sleep(10)


KINDS: dict[str, Callable[[], None]] = {
    "event": lambda: episodes(event),
    "lock": lambda: episodes(lock),
    "sleep": lambda: episodes(sleep),
    "queue": lambda: episodes(queue),
    "process": lambda: episodes(process),
    "polling": lambda: episodes(polling),
    "failed_task": lambda: episodes(failed_task),
    "thread": lambda: episodes(thread),
    "spinning": lambda: episodes(spinning),
    "blocking": lambda: episodes(blocking),
    "tool": lambda: episodes(tool),
    "reward": reward,
    "own_reward": own_reward,
    "outside_agent": outside_agent,
    "no_agents": no_agents,
    "turn": turn,
    "program": program,
    "session": session,
    "nothing_admitted": nothing_admitted,
    "blocking_source": blocking_source,
    "progressing": lambda: episodes(progressing),
    "downloading": lambda: episodes(downloading),
    "first": lambda: episodes(first),
}

if __name__ == "__main__":
    KINDS[sys.argv[1]]()
