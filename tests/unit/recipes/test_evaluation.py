"""Test pass@k against its definition, and the figures of each source."""

from __future__ import annotations

import itertools
import statistics

import pytest

from helmsman import SamplingParams
from helmsman.recipes.evaluation import evaluate, pass_at_k
from helmsman.recipes.prompts import Row
from helmsman.recipes.settings import Evaluation


@pytest.mark.parametrize(
    ("num_samples", "num_right"), [(1, 0), (1, 1), (5, 0), (5, 1), (5, 3), (6, 6)]
)
def test_pass_at_k(num_samples: int, num_right: int) -> None:
    answers = [True] * num_right + [False] * (num_samples - num_right)
    for k in range(1, num_samples + 1):
        expected = statistics.fmean(any(chosen) for chosen in itertools.combinations(answers, k))
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(expected)


def test_pass_at_k_too_few_samples() -> None:
    with pytest.raises(ValueError, match="pass@3 of"):
        pass_at_k(2, 1, 3)


def row(answer: int, source: str) -> Row:
    return Row([answer], str(answer), answer, source, {})


async def test_evaluate_all_and_each_source() -> None:
    rows = [row(0, "a"), row(1, "a"), row(2, "b")]
    used: list[SamplingParams] = []

    async def judge(row: Row, sampling: SamplingParams) -> bool:
        used.append(sampling)
        if sampling.temperature == 0:
            return bool(row.answer == 2)
        assert sampling.seed is not None
        return bool(row.answer) and sampling.seed % 2 == 0

    settings = Evaluation(samples=4, k=(1, 4), temperature=0.7, top_p=0.9)
    sampling = SamplingParams(max_new_tokens=9, stop_token_ids=(1,))
    found = await evaluate(rows, settings, sampling, judge, seed=3)

    assert {name: each.num_prompts for name, each in found.items()} == {"all": 3, "a": 2, "b": 1}
    assert found["all"].greedy_accuracy == pytest.approx(1 / 3)
    assert (found["a"].greedy_accuracy, found["b"].greedy_accuracy) == (0.0, 1.0)
    assert found["all"].pass_at_k[4] == pytest.approx(
        (2 * found["a"].pass_at_k[4] + found["b"].pass_at_k[4]) / 3
    )
    drawn = [each for each in used if each.temperature]
    assert len(drawn) == 12
    assert len({each.seed for each in drawn}) == 12
    assert {
        (each.temperature, each.top_p, each.max_new_tokens, each.stop_token_ids) for each in drawn
    } == {(0.7, 0.9, 9, (1,))}
    assert (await evaluate(rows, settings, sampling, judge, seed=3)) == found


async def test_evaluate_leaves_unknown_answers_out() -> None:
    async def judge(row: Row, sampling: SamplingParams) -> bool | None:
        if sampling.temperature == 0:
            return {0: None, 1: True, 2: False}.get(row.answer)
        return None if row.answer == 0 or (row.answer == 1 and sampling.seed == seeds[0]) else True

    seeds: list[int | None] = []

    async def note(row: Row, sampling: SamplingParams) -> bool:
        seeds.extend([sampling.seed] if row.answer == 1 else [])
        return True

    rows = [row(0, "a"), row(1, "b"), row(2, "b")]
    settings = Evaluation(samples=2, k=(1, 2), greedy=False)
    await evaluate(rows, settings, SamplingParams(), note, seed=0)
    settings = Evaluation(samples=2, k=(1, 2))
    found = await evaluate(rows, settings, SamplingParams(), judge, seed=0)
    assert (found["all"].num_prompts, found["all"].greedy_accuracy) == (3, 0.5)
    assert found["all"].pass_at_k == {1: 1.0, 2: 1.0}
    assert (found["a"].greedy_accuracy, found["a"].pass_at_k) == (None, {})


async def test_evaluate_one_source_greedy() -> None:
    async def judge(row: Row, sampling: SamplingParams) -> bool:
        return True

    found = await evaluate([row(0, "a")], Evaluation(samples=0), SamplingParams(), judge, seed=0)
    assert list(found) == ["all"]
    assert (found["all"].greedy_accuracy, found["all"].pass_at_k) == (1.0, {})
