"""Test the scorer of the GRPO recipe, which calls rewards in processes with a limit of time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helmsman import InlineScheduler
from helmsman.recipes.prompts import Row
from helmsman.recipes.rewards import GIVEN
from helmsman.recipes.scorer import Scored, Scorer
from helmsman.recipes.settings import Reward
from tests.unit.recipes.data import completed

ROW = Row([1], "1+1=", "2", "sums", {"prompt": "1+1=", "answer": "2", "level": 3})
SOURCE = """
import asyncio, os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {'score': float(solution_str == ground_truth) + extra_info['level'], 'note': data_source}

async def by_a_judge(completion, scale=1.0):
    await asyncio.sleep(0)
    return scale * len(completion)

def never_ends(completion):
    time.sleep(1000)

def ends(completion):
    if completion == 'end':
        os._exit(3)
    return 1.0

def broken(completion):
    raise KeyError('oops')

def everything(**given):
    return float(len(given))

def no_number(completion):
    return {'text': 'good', 'nothing': float('nan')}.get(completion)

async def shortest(completions):
    return [float(len(text) == min(map(len, completions))) for text in completions]

def stuck(completions):
    time.sleep(1000)
"""


@pytest.fixture
def reward(tmp_path: Path) -> Callable[..., Reward]:
    """Return a reward of one process by the name of a function of a file."""
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return lambda function, **given: Reward(use=f"{path}:{function}", **{"processes": 1, **given})


def score(
    rewards: list[Reward],
    *texts: str,
    functions: dict[str, Callable[..., Any]] | None = None,
) -> list[Scored]:
    """Score answers of one token each to one prompt."""

    async def run(scorer: Scorer) -> list[Scored]:
        return await scorer.score(ROW, [completed(text) for text in texts])

    with InlineScheduler() as scheduler, Scorer(rewards, scheduler, functions or {}) as scorer:
        return asyncio.run(run(scorer))


def test_scorer_weighted_sum(reward: Callable[..., Reward]) -> None:
    """A reward that takes a batch compares all answers to a prompt."""
    rewards = [
        Reward(use="exact", processes=1),
        reward("compute_score", weight=0.5),
        reward("by_a_judge", name="judge", weight=2.0, args={"scale": 0.25}),
        reward("shortest", weight=10.0),
    ]
    first, second = score(rewards, "2", "34")
    assert first.values == {"exact": 1.0, "compute_score": 4.0, "judge": 0.25, "shortest": 1.0}
    assert first.total == 1.0 + 2.0 + 0.5 + 10.0
    assert second.values == {"exact": 0.0, "compute_score": 3.0, "judge": 0.5, "shortest": 0.0}
    assert second.total == 1.5 + 1.0


def test_scorer_timeout(reward: Callable[..., Reward]) -> None:
    """The timeout of a reward that takes a batch fails for all answers."""
    (found,) = score([reward("never_ends", timeout_s=0.2), Reward(use="exact", processes=1)], "2")
    (failure,) = found.failures
    assert (found.values, found.is_left_out) == ({"exact": 1.0}, True)
    assert failure.reward == "never_ends"
    assert "(limit 0.2 s, RewardPool's timeout)" in failure.cause
    found_of_batch = score([reward("stuck", timeout_s=0.5)], "2", "3")
    assert [(each.values, len(each.failures)) for each in found_of_batch] == [({}, 1)] * 2


def test_scorer_lost_process(reward: Callable[..., Reward]) -> None:
    ended, good = score([reward("ends")], "end", "2")
    assert (
        "has no result and was not repeated, because its worker exited" in ended.failures[0].cause
    )
    assert good == Scored({"ends": 1.0}, 1.0)


@pytest.mark.parametrize(
    ("on_failure", "values", "is_left_out"),
    [("drop", {"exact": 1.0}, True), ("value", {"broken": -2.0, "exact": 1.0}, False)],
)
def test_scorer_function_raises(
    reward: Callable[..., Reward], on_failure: str, values: dict[str, float], is_left_out: bool
) -> None:
    failing = reward("broken", weight=0.5, on_failure=on_failure, failure_value=-2.0)
    (found,) = score([failing, Reward(use="exact", processes=1)], "2")
    assert (found.values, found.is_left_out) == (values, is_left_out)
    assert math.isnan(found.total) if is_left_out else found.total == 0.0
    assert "raised KeyError: 'oops'" in found.failures[0].cause.partition("\n")[0]
    assert "in broken" in found.failures[0].cause, "the traceback"


@pytest.mark.parametrize(
    ("completion", "cause"),
    [
        (
            "text",
            "returned 'good'; expected a finite number, a mapping with 'score', or None where",
        ),
        ("nothing", "returned nan; expected a finite number"),
        ("2", "returned None; expected a number from at least one reward"),
    ],
)
def test_scorer_result_not_a_number(
    reward: Callable[..., Reward], completion: str, cause: str
) -> None:
    (found,) = score([reward("no_number", on_cluster=True)], completion)
    assert found.failures[0].cause.startswith(cause)


def test_scorer_reward_that_does_not_apply(reward: Callable[..., Reward]) -> None:
    """TRL leaves None out of the sum."""
    (found,) = score([reward("no_number"), Reward(use="exact", processes=1)], "2")
    assert found == Scored({"exact": 1.0}, 1.0)


def test_scorer_on_cluster(reward: Callable[..., Reward]) -> None:
    (found,) = score([reward("everything", on_cluster=True, processes=2)], "2")
    assert found.total == len(GIVEN)


def test_scorer_function_of_a_script() -> None:
    """A function that no process can import is sent by value."""
    secret = 40

    def own(completion: str) -> float:
        return secret + float(completion)

    (found,) = score([Reward(use="s:own", processes=1)], "2", functions={"s:own": own})
    assert found.values == {"own": 42.0}
