"""All rewards of a run, each computed in its own processes under a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from helmsman import GenerationResult, Job, RewardPool, Scheduler, SchedulingSpec
from helmsman.api.errors import RewardLostError, RewardTimeoutError
from helmsman.recipes.prompts import Row
from helmsman.recipes.rewards import make_caller
from helmsman.recipes.settings import Reward, name_of

_MAX_RESTARTS = 10_000
"""Restarts of a pool's processes allowed within an hour. Each timeout costs one restart, and a run
with many timeouts must continue.
"""


class Scored(msgspec.Struct, frozen=True):
    """The rewards of an answer."""

    values: dict[str, float]
    """Unweighted rewards by name."""
    total: float
    """Weighted sum of the rewards."""
    failed: int = 0
    """Number of rewards that timed out or lost their process, and count as 0."""


class Completion(NamedTuple):
    """An answer to be scored."""

    text: str
    """Without special tokens."""
    result: GenerationResult

    def given(self, row: Row) -> dict[str, Any]:
        """Return the arguments for rewards about this answer to the prompt of ``row``."""
        token_ids = list(self.result.token_ids)
        return {
            "completion": self.text,
            "answer": row.answer,
            "prompt": row.prompt,
            "source": row.source,
            "row": row.entry,
            "num_tokens": len(token_ids),
            "is_truncated": self.result.stop_reason == "length",
            "token_ids": token_ids,
            "chat": row.asked,
        }


_Value = tuple[Any, bool]
"""A reward of an answer, and whether it timed out or lost its process."""


class Scorer(contextlib.AbstractContextManager["Scorer"]):
    """All rewards of a run, each with a pool of processes.

    Args:
        rewards: The settings; rewards with ``on_cluster`` run on the scheduler's workers.
        scheduler: The scheduler of the run.
        functions: Functions that the script passed, by ``Reward.use``.

    Raises:
        ValueError: There is no such reward, or it cannot be called.
        HelmsmanError: A package is missing, or workers cannot be started.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        scheduler: Scheduler,
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self._rewards = tuple(rewards)
        self._held = contextlib.ExitStack()
        self._pools: list[tuple[RewardPool, bool]] = []
        with contextlib.ExitStack() as starting:
            for reward in self._rewards:
                caller = make_caller(reward, functions)
                if reward.on_cluster:
                    job = Job(
                        role=f"reward-{name_of(reward)}",
                        replicas=reward.processes,
                        tasks=[SchedulingSpec(cpu=1)],
                    )
                    pool = RewardPool(
                        scheduler, caller, job, reward.timeout_s, max_restarts=_MAX_RESTARTS
                    )
                    starting.enter_context(pool).initialize()
                else:
                    pool = RewardPool.on_this_machine(
                        caller, reward.processes, reward.timeout_s, max_restarts=_MAX_RESTARTS
                    )
                    starting.enter_context(pool)
                self._pools.append((pool, caller.takes_batches))
            self._held = starting.pop_all()

    async def score(self, row: Row, answers: Sequence[asyncio.Future[Completion]]) -> list[Scored]:
        """Compute all rewards of the answers to a prompt.

        A reward that takes batches is computed when all answers are complete; any other, for each
        answer as soon as it is complete.

        Args:
            row: The row of the prompt.
            answers: The answers, complete or still being generated.

        Returns:
            The rewards of each answer; one that timed out or lost its process counts as 0.

        Raises:
            EngineCallError: A reward raised; it carries the traceback.
            ValueError: A reward is not a finite number, or a batch has the wrong length.
            Exception: The error of an answer.
        """
        by_pool = await asyncio.gather(
            *(self._of_pool(pool, batches, row, answers) for pool, batches in self._pools)
        )
        return [self._sum(values) for values in zip(*by_pool, strict=True)]

    async def _of_pool(
        self,
        pool: RewardPool,
        takes_batches: bool,
        row: Row,
        answers: Sequence[asyncio.Future[Completion]],
    ) -> list[_Value]:
        async def one(answer: asyncio.Future[Completion]) -> _Value:
            (value,) = await self._call(pool, row, [await answer])
            return value

        if takes_batches:
            return await self._call(pool, row, await asyncio.gather(*answers))
        return await asyncio.gather(*map(one, answers))

    async def _call(
        self, pool: RewardPool, row: Row, completions: Sequence[Completion]
    ) -> list[_Value]:
        """Return the reward of each answer, and whether it timed out or lost its process."""
        try:
            values = await pool([each.given(row) for each in completions])
        except (RewardTimeoutError, RewardLostError):
            return [(0.0, True)] * len(completions)
        return [(value, False) for value in values]

    def _sum(self, values: Sequence[_Value]) -> Scored:
        by_name = {
            name_of(reward): _as_number(name_of(reward), value)
            for reward, (value, _) in zip(self._rewards, values, strict=True)
        }
        total = sum(reward.weight * by_name[name_of(reward)] for reward in self._rewards)
        return Scored(by_name, total, sum(is_lost for _, is_lost in values))

    def __exit__(self, *_: object) -> None:
        self._held.close()


def _as_number(name: str, value: Any) -> float:
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ValueError(
        f"the reward {name!r} returned {value!r}; expected a finite number, or a mapping with "
        "'score'"
    )
