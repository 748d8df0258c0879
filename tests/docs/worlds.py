"""Names that the snippets of each page assume, such as a scheduler, and smaller sizes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import random
import shutil
import sys
import threading
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import helmsman
import helmsman.policies
import helmsman.weights
import helmsman.worker_groups
from helmsman import (
    Batch,
    GroupWorker,
    InlineScheduler,
    Job,
    RolloutController,
    SamplingParams,
    SchedulingStrategy,
    TrainController,
    make_scheduler,
)
from helmsman.api.advantages import gae, group_advantages, whiten
from helmsman.api.engines import loss_traits
from helmsman.api.generation import GenerationResult
from helmsman.api.pairs import pair_samples
from helmsman.api.reward_shaping import token_rewards
from helmsman.engines.rollout import HFRolloutEngine
from helmsman.recipes import make_model
from tests.docs.rewards import Task, check
from tests.docs.snippets import ROOT, Snippet
from tests.engines.preload import PRELOAD
from tests.engines.small_models import QWEN2

TRAINER = "helmsman.engines.train.FSDPTrainEngine"
ROLLOUT = "helmsman.engines.rollout.HFRolloutEngine"
TINY = {"model": QWEN2}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
SAMPLING = SamplingParams(max_new_tokens=4)


class TinyRollout(HFRolloutEngine):
    """A rollout engine that needs no arguments."""

    def __init__(self) -> None:
        super().__init__(model=QWEN2)


class Role(GroupWorker):
    """Worker of a group without methods of its own."""

    def describe(self) -> str:
        return repr(self.rank_info)


class PlanOnly(InlineScheduler):
    """Plans the workers of a snippet on a machine that has room for them."""

    def create_workers(self, job: Job | Collection[Job]) -> list[str]:
        self.plan(job)
        return []


@dataclass
class Sample:
    task: Task
    answer: Any
    reward: float


def training_sample(prompt: Sequence[int], answer: Any, advantage: float) -> dict[str, Any]:
    """A sample with the columns that policy losses read."""
    skip, num = [0] * len(prompt), len(answer.token_ids)
    return {
        "input_ids": [*prompt, *answer.token_ids],
        "loss_mask": skip + [1] * num,
        "logprobs": skip + answer.logprobs,
        "advantages": skip + [advantage] * num,
    }


def samples_of(answers: Sequence[Any]) -> list[dict[str, Any]]:
    """Samples of results of generate(PROMPTS), or of a batch of episodes."""
    if answers and hasattr(answers[0], "value"):
        episodes = [each.value for each in answers]
        return [
            training_sample(each.task.prompt_ids, each.answer, each.reward - 0.5)
            for each in episodes
        ]
    prompts = itertools.cycle(PROMPTS)
    return [
        training_sample(prompt, answer, 0.5)
        for prompt, answer in zip(prompts, answers, strict=False)
    ]


class World:
    """Names for the snippets of a page, sizes for this machine, and code between snippets.

    Args:
        setup: Makes the names, given a stack on which they are closed.
        sizes: Replacements in the code, each of which must occur.
        before: Part of a snippet -> code that runs before it.
    """

    is_notebook = False

    def __init__(
        self,
        setup: Callable[[contextlib.ExitStack], dict[str, Any]] | None = None,
        sizes: Sequence[tuple[str, str]] = (),
        before: dict[str, str] | None = None,
        is_notebook: bool = False,
    ) -> None:
        self._setup = setup
        self._sizes = sizes
        self._before = before or {}
        self.is_notebook = is_notebook
        self._stack = contextlib.ExitStack()
        self.names: dict[str, Any] = {}

    def __enter__(self) -> dict[str, Any]:
        public = {
            name: getattr(module, name)
            for module in (helmsman, helmsman.policies, helmsman.weights, helmsman.worker_groups)
            for name in module.__all__
        }
        self.names |= public | {"__name__": "page"}
        self.names |= self._setup(self._stack) if self._setup else {}
        return self.names

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def prepared(self, snippets: Sequence[Snippet]) -> Iterator[tuple[Snippet, str]]:
        """Each snippet with the code to run."""
        unused = {old for old, _ in self._sizes} | set(self._before)
        for snippet in snippets:
            for part, code in self._before.items():
                if part in snippet.code:
                    unused.discard(part)
                    exec(code, self.names)
            code = snippet.code
            for old, new in self._sizes:
                if old in code:
                    unused.discard(old)
                    code = code.replace(old, new)
            yield snippet, code
        if unused:
            raise LookupError(
                f"the page does not have {sorted(unused)}, which tests/docs/worlds.py expects there"
            )


# --- pages ----------------------------------------------------------------------------------------


def roles(
    stack: contextlib.ExitStack, scheduler: Any, *, colocated: bool = False
) -> dict[str, Any]:
    """A started trainer of one rank and two rollout instances with a tiny model."""
    strategy = (
        SchedulingStrategy(type="colocation", target="train", fork=True)
        if colocated
        else SchedulingStrategy()
    )
    job = Job(role="rollout", replicas=1 if colocated else 2, scheduling_strategy=strategy)
    kwargs = {**TINY, "lr": 1e-3}
    train = TrainController(scheduler, TRAINER, Job(role="train"), engine_kwargs=kwargs)
    rollout = RolloutController(scheduler, ROLLOUT, job, engine_kwargs=TINY)
    for each in (train, rollout):
        if colocated:  # the snippet starts them
            stack.callback(each.close)
        else:
            stack.enter_context(each)
    return {"train": train, "rollout": rollout}


def tutorial(stack: contextlib.ExitStack) -> dict[str, Any]:
    scheduler = stack.enter_context(make_scheduler("local", preload=PRELOAD))
    return roles(stack, scheduler)


def rollouts(stack: contextlib.ExitStack) -> dict[str, Any]:
    from helmsman.testing import log_normal_lengths

    scheduler = stack.enter_context(make_scheduler("local", preload=PRELOAD))
    Path("my_rewards.py").write_text("def score(answer):\n    return float(answer)\n")
    started = roles(stack, scheduler)
    started["rollout"].close()
    made = {"token_ids": [1, 2], "logprobs": [-1.0, -1.0], "versions": [0, 0]}
    answers = [
        GenerationResult(request_id=str(n), stop_reason="length", **made)  # type: ignore[arg-type]
        for n in range(4)
    ]
    return {
        **started,
        "roles": functools.partial(roles, stack, scheduler),
        "scheduler": scheduler,
        "engine": TinyRollout,
        "prompts": PROMPTS,
        "prompts_of": lambda number: PROMPTS,
        "prompt": PROMPTS[0],
        "sampling": SAMPLING,
        "Sample": Sample,
        "check": check,
        "is_of_use": lambda episode: True,
        "num_steps": 2,
        "tasks": (Task(random.choice(PROMPTS)) for _ in itertools.count()),
        "samples_of": samples_of,
        "samples": samples_of(answers),
        "answers": [1, 2, 3],
        "lengths": log_normal_lengths,
        "shutil": shutil,
    }


def planned(stack: contextlib.ExitStack) -> dict[str, Any]:
    return {
        "scheduler": stack.enter_context(PlanOnly(num_cpus=4096, num_gpus=512)),
        "path": "model",
    }


def losses(stack: contextlib.ExitStack) -> dict[str, Any]:
    scheduler = stack.enter_context(make_scheduler("local", preload=PRELOAD))
    samples = [{"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 1, 1]} for _ in range(4)]
    pair = (
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
        {"input_ids": [1, 2, 4], "loss_mask": [0, 1, 1]},
    )
    return {
        "scheduler": scheduler,
        "ENGINE": TRAINER,
        "folder": QWEN2,
        **{f"{name}_job": Job(role=name) for name in ("policy", "critic", "reference")},
        "samples": samples,
        "masks": [each["loss_mask"] for each in samples],
        "scores": [1.0, 0.0, 1.0, 0.0],
        "pairs": [pair, pair],
        **{
            each.__name__: each
            for each in (token_rewards, gae, whiten, pair_samples, group_advantages)
        },
        "loss_traits": loss_traits,
        "stack": stack,
    }


def groups(stack: contextlib.ExitStack) -> dict[str, Any]:
    scheduler = stack.enter_context(make_scheduler("inline", num_cpus=64, num_gpus=24))
    return {
        "scheduler": scheduler,
        "batch": Batch({"tokens": [[n] for n in range(8)]}),
        "Engine": TinyRollout,
        "prompts": PROMPTS,
    }


def others(stack: contextlib.ExitStack) -> dict[str, Any]:
    scheduler = stack.enter_context(make_scheduler("inline", num_cpus=64, num_gpus=16))
    tasks = [{"prompt_ids": prompt} for prompt in PROMPTS * 20]
    make_model(Path("qwen"), num_layers=2, width=64)
    Path("train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    return {**roles(stack, scheduler), "scheduler": scheduler, "tasks": tasks, "PPO": Role}


SOLVE = """
import os

assert os.environ["HELMSMAN_SESSION_URL"] and os.environ["OPENAI_API_KEY"]
print("done", os.environ["HELMSMAN_TASK"])
"""


SERVER = """
from mcp.server import MCPServer

server = MCPServer("docs")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

server.run()
"""


def agents(stack: contextlib.ExitStack) -> dict[str, Any]:
    from helmsman.agents import AgentGateway
    from helmsman.agents.gateway import load_tokenizer

    scheduler = stack.enter_context(make_scheduler("inline"))
    folder = str(make_model(Path("tiny"), num_layers=1, width=32))
    tokenizer = load_tokenizer(folder)
    model: dict[str, Any] = {"model": folder}
    train = TrainController(scheduler, TRAINER, Job(role="train"), engine_kwargs=model)
    rollout = RolloutController(scheduler, ROLLOUT, Job(role="rollout"), engine_kwargs=model)
    for each in (train, rollout):
        stack.enter_context(each)
    gateway = stack.enter_context(AgentGateway(rollout, tokenizer, sampling=SAMPLING))
    Path("solve.py").write_text(SOLVE)
    Path("server.py").write_text(SERVER)
    return {
        "train": train,
        "rollout": rollout,
        "tokenizer": tokenizer,
        "sys": sys,
        "try_agent": functools.partial(try_agent, gateway),
        "finish_outside": finish_outside,
    }


def try_agent(gateway: Any, agent: Callable[..., Any]) -> None:
    """Run a session of an agent that a snippet has defined."""

    async def run() -> None:
        async with gateway.session() as session:
            given = {"task": {"prompt": "2+2=", "answer": "4"}, "session": session}
            assert (await agent(**given)) >= 0

    done: list[None] = []
    thread = threading.Thread(target=lambda: done.append(asyncio.run(run())))
    thread.start()
    thread.join()
    assert done, "the agent has failed"


def finish_outside(gateway: Any) -> None:
    """Open and finish a session, as an agent elsewhere does."""

    def post(url: str, key: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    made = post(f"{gateway.url}/sessions", gateway.key, {"metadata": {"task": 7}})
    chat = {"messages": [{"role": "user", "content": "2+2="}]}
    post(f"{made['base_url']}/chat/completions", made["api_key"], chat)
    post(f"{gateway.url}/sessions/{made['id']}/finish", made["api_key"], {"reward": 1})


REPLICAS = [
    ("replicas=8", "replicas=2"),
    ("num_processes=8", "num_processes=1"),
    ("batch_size=256", "batch_size=4"),
]
START = "rollout.close(); train.close(); globals().update(roles())"
WORLDS: dict[str, World] = {
    "docs/tutorial.md": World(tutorial),
    "docs/notebooks.md": World(is_notebook=True),
    "docs/agents.md": World(
        agents,
        is_notebook=True,
        sizes=[
            ("max_new_tokens=256", "max_new_tokens=4"),
            ('McpTools("uvx my-server")', 'McpTools(f"{sys.executable} server.py")'),
            ('"python solve.py"', 'f"{sys.executable} solve.py"'),
            ("collect(32)", "collect(1)"),
        ],
        before={
            "import McpTools": "try_agent(coding_agent)",
            "import AgentGateway": "try_agent(tool_agent)",
            "gateway.collect": "finish_outside(gateway)",
        },
    ),
    "docs/placement.md": World(planned, sizes=[("mem=64", "mem=0")]),
    "docs/engines.md": World(planned),
    "docs/training.md": World(
        losses,
        before={
            "logprobs, ref_logprobs": "for each in (policy, critic, reference):\n"
            "    stack.enter_context(each)"
        },
    ),
    "docs/worker_groups.md": World(groups, sizes=[("num_gpus_per_node=8", "num_gpus_per_node=24")]),
    "docs/coming_from.md": World(
        others,
        sizes=[
            ("num_gpus_per_node=8", "num_gpus_per_node=16"),
            ('"/models/qwen"', '"qwen"'),
            ('"max_new_tokens": 256}', '"max_new_tokens": 8}, steps=1, prompts_per_step=2'),
            ('{"placement": "colocated"}', '{"scheduler": "local"}'),
        ],
    ),
    "docs/rollouts.md": World(
        rollouts,
        sizes=[
            *REPLICAS,
            ("1, 1000)", "1, 2)"),
            ("replicas=32", "replicas=1"),
            ("scale(12)", "scale(4)"),
            ("(1, 101)", "(1, 4)"),
        ],
        before={
            "policy=PrefixAffinity()": "rollout.close()",
            "groups = rollout": START,
            "def step(number):  # draws": "shutil.rmtree('runs/a/checkpoints')",
            "train.sleep()": START.replace("roles()", "roles(colocated=True)"),
            "ViaMemory(),  # or": START,
        },
    ),
}


def world_of(page: Path) -> World:
    """The world of a page; an empty one for a page whose snippets need none."""
    return WORLDS.get(str(page.relative_to(ROOT)), World())
