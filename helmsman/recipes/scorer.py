"""All rewards of a run, each computed in its own processes under a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from helmsman import GenerationResult, Job, RewardPool, Scheduler
from helmsman.recipes.judges import Judge, JudgeReward, Pool, Value, values_of
from helmsman.recipes.prompts import Row
from helmsman.recipes.rewards import make_caller
from helmsman.recipes.settings import Reward, name_of

_MAX_RESTARTS = 10_000
"""Restarts of a pool's processes allowed within an hour. Each timeout costs one restart, and a run
with many timeouts must continue.
"""


class Failure(msgspec.Struct, frozen=True):
    """A reward that could not be computed for an answer."""

    reward: str
    """Its name."""
    cause: str
    """The error, with the traceback of the reward's process if there is one."""
    policy: Literal["drop", "raise", "value"] = "drop"
    """``Reward.on_failure``."""


class Scored(msgspec.Struct, frozen=True):
    """The rewards of an answer."""

    values: dict[str, float]
    """Unweighted rewards by name, without those that failed or do not apply to the answer."""
    total: float
    """Weighted sum of the rewards; NaN for an answer that is left out."""
    failures: tuple[Failure, ...] = ()

    @property
    def is_left_out(self) -> bool:
        """Whether a reward failed, and no value stands for it."""
        return any(failure.policy != "value" for failure in self.failures)


class Completion(NamedTuple):
    """An answer to be scored."""

    text: str
    """Without special tokens."""
    result: GenerationResult

    def given(self, row: Row) -> dict[str, Any]:
        """Return the arguments for rewards about this answer to the prompt of ``row``."""
        return {
            "completion": self.text,
            "answer": row.answer,
            "prompt": row.prompt,
            "source": row.source,
            "row": row.entry,
            "num_tokens": len(self.result.token_ids),
            "is_truncated": self.result.stop_reason == "length",
            "token_ids": self.result.token_ids,
            "chat": row.asked,
        }


_Answers = Sequence[asyncio.Future[Completion]]


class Scorer(contextlib.AbstractContextManager["Scorer"]):
    """All rewards of a run, each with a pool of processes.

    Args:
        rewards: The settings; rewards with ``on_cluster`` run on the scheduler's workers.
        scheduler: The scheduler of the run.
        functions: Functions that the script passed, by ``Reward.use``.
        judges: The judges, which are served.

    Raises:
        ValueError: There is no such reward, or it cannot be called.
        HelmsmanError: A package is missing, or workers cannot be started.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        scheduler: Scheduler,
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        judges: Sequence[Judge] = (),
    ) -> None:
        self._rewards = tuple(rewards)
        self._pools: list[tuple[Pool, bool]] = []
        with contextlib.ExitStack() as starting:
            for reward in self._rewards:
                judge = next((each for each in judges if each.reward is reward), None)
                if judge is None:
                    caller = make_caller(reward, functions)
                    pool = _start(starting, reward, scheduler, caller)
                    self._pools.append((pool, caller.takes_batches))
                else:
                    own = judge.parser
                    parse = None if own is None else _start(starting, reward, scheduler, own)
                    self._pools.append((JudgeReward(judge, parse), False))
            self._held = starting.pop_all()

    async def score(self, row: Row, answers: _Answers) -> list[Scored]:
        """Compute all rewards of the answers to a prompt.

        A reward that takes batches is computed when all answers are complete; any other, for each
        answer as soon as it is complete.

        Args:
            row: The row of the prompt.
            answers: The answers, complete or still being generated.

        Returns:
            The rewards of each answer, with those that failed.

        Raises:
            Exception: The error of an answer.
        """
        by_pool = await asyncio.gather(*(_of_pool(row, answers, *each) for each in self._pools))
        if not by_pool:  # a teacher alone judges the answers
            return [Scored({}, 0.0) for _ in await asyncio.gather(*answers)]
        return [self._sum(values) for values in zip(*by_pool, strict=True)]

    def _sum(self, values: Sequence[Value]) -> Scored:
        """Add up the rewards of an answer, as TRL does: one that is None is left out of the sum."""
        if all(value is None for value in values):
            error = ValueError("returned None; expected a number from at least one reward")
            values = [error, *values[1:]]
        by_name, failures, total = dict[str, float](), list[Failure](), 0.0
        for reward, value in zip(self._rewards, values, strict=True):
            name, found = name_of(reward), value
            if isinstance(found, Exception):
                failures.append(Failure(name, str(found), reward.on_failure))
                found = reward.failure_value if reward.on_failure == "value" else math.nan
            if found is not None:
                total += reward.weight * found
                by_name |= {} if math.isnan(found) else {name: found}
        return Scored(by_name, total, tuple(failures))

    def __exit__(self, *_: object) -> None:
        self._held.close()


async def _of_pool(row: Row, answers: _Answers, pool: Pool, takes_batches: bool) -> list[Value]:
    async def score(batch: _Answers) -> list[Value]:
        return await values_of(pool, [each.given(row) for each in await asyncio.gather(*batch)])

    batches = [answers] if takes_batches else [[answer] for answer in answers]
    return [value for values in await asyncio.gather(*map(score, batches)) for value in values]


def _start(
    held: contextlib.ExitStack, reward: Reward, scheduler: Scheduler, function: Callable[..., Any]
) -> RewardPool:
    """Start the processes of a reward, which end with ``held``."""
    if not reward.on_cluster:
        pool = RewardPool.on_this_machine(
            function, reward.processes, reward.timeout_s, max_restarts=_MAX_RESTARTS
        )
        return held.enter_context(pool)
    job = Job(role=f"reward-{name_of(reward)}", replicas=reward.processes)
    pool = RewardPool(scheduler, function, job, reward.timeout_s, max_restarts=_MAX_RESTARTS)
    held.enter_context(pool).initialize()
    return pool
