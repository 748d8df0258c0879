"""Evaluation on held-out prompts: greedy accuracy and pass@k, by source of the data."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from helmsman import SamplingParams
from helmsman.recipes.answers import Answers
from helmsman.recipes.batches import deciding_reward
from helmsman.recipes.failures import Judged, note_failures
from helmsman.recipes.files import write_json
from helmsman.recipes.prompts import Row
from helmsman.recipes.settings import Evaluation, GRPOSettings

log = logging.getLogger(__name__)

Judge = Callable[[Row, SamplingParams], Awaitable[bool | None]]
"""Answers a prompt once, and returns whether the answer is correct; None if that is unknown."""

ALL = "all"
"""Name of the results over all sources."""


class SourceResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one source."""

    num_prompts: int
    greedy_accuracy: float | None = None
    """Fraction of prompts with a correct greedy answer, of those whose answer was judged."""
    pass_at_k: dict[int, float] = {}
    """k -> probability that at least one of k answers is correct, mean over prompts."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one evaluation, as written to ``evaluations/step-000010.json``."""

    step: int
    weight_version: int
    samples: int
    """Answers per prompt from which pass@k is estimated."""
    temperature: float
    seconds: float
    failed: int
    """Answers whose reward failed, which are left out, and sessions of an agent that failed."""
    by_source: dict[str, SourceResult]

    def metrics(self) -> dict[str, float]:
        """Return metrics like ``eval/pass@1``; with several sources also ``eval/<source>/...``."""
        found = {"eval/reward/failed": float(self.failed)}
        for source, result in self.by_source.items():
            prefix = "eval" if source == ALL else f"eval/{source}"
            if result.greedy_accuracy is not None:
                found[f"{prefix}/greedy_accuracy"] = result.greedy_accuracy
            found |= {f"{prefix}/pass@{k}": value for k, value in result.pass_at_k.items()}
        return found


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k answers is correct.

    The estimate is 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374, eq. 1).

    Args:
        num_samples: Number of answers n.
        num_right: Number of correct answers c.
        k: Number of attempts, at most n.

    Raises:
        ValueError: The numbers are inconsistent.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_samples} answers, {num_right} of them right, is undefined"
        )
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


async def evaluate(
    rows: Sequence[Row], settings: Evaluation, sampling: SamplingParams, judge: Judge, *, seed: int
) -> dict[str, SourceResult]:
    """Evaluate held-out prompts.

    Args:
        rows: The held-out prompts.
        settings: Number of answers, temperature and k.
        sampling: Length and stop tokens; the settings replace its other fields.
        judge: Answers a prompt once, and returns whether the answer is correct, or None.
        seed: Seed of the sampled answers, the same at every evaluation.

    Returns:
        Results over all prompts under ``ALL``; with several sources also by source. Answers
        without a judgement are left out, and prompts with fewer than k other ones from pass@k.
    """
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, seed=0)
    drawn = replace(sampling, temperature=settings.temperature, top_p=settings.top_p, top_k=0)

    async def answer(number: int, row: Row) -> tuple[bool | None, list[bool]]:
        rng = random.Random(f"{seed}/evaluation {number}")
        samplings = [replace(drawn, seed=rng.getrandbits(31)) for _ in range(settings.samples)]
        samplings += [greedy] if settings.greedy else []
        found = await asyncio.gather(*(judge(row, each) for each in samplings))
        of_greedy = found.pop() if settings.greedy else None
        return of_greedy, [each for each in found if each is not None]

    answers = await asyncio.gather(*(answer(number, row) for number, row in enumerate(rows)))
    answered = [*zip(rows, answers, strict=True)]
    sources = sorted({row.source for row in rows})
    results = {}
    for source in [ALL, *(sources if len(sources) > 1 else [])]:
        chosen = [each for row, each in answered if source in (ALL, row.source)]
        of_greedy = [first for first, _ in chosen if first is not None]
        of_k = {
            k: [pass_at_k(len(right), sum(right), k) for _, right in chosen if len(right) >= k]
            for k in (settings.k if settings.samples else ())
        }
        results[source] = SourceResult(
            num_prompts=len(chosen),
            greedy_accuracy=statistics.fmean(of_greedy) if of_greedy else None,
            pass_at_k={k: statistics.fmean(values) for k, values in of_k.items() if values},
        )
    return results


def evaluate_answers(
    rows: Sequence[Row],
    answers: Answers,
    settings: GRPOSettings,
    sampling: SamplingParams,
    *,
    step: int,
    version: int,
) -> dict[str, float]:
    """Answer the held-out prompts with the current weights, and write the results.

    Args:
        rows: The held-out prompts.
        answers: Answers prompts, and rewards the answers.
        settings: The settings of the run.
        sampling: Sampling parameters of training.
        step: Number of the step.
        version: Version of the weights.

    Returns:
        The results as metrics.
    """
    right, found, started = deciding_reward(settings), settings.evaluation, time.monotonic()
    longest = found.max_new_tokens or settings.rollout.max_new_tokens
    sampling = replace(sampling, max_new_tokens=longest)
    failed, judged = 0, list[Judged]()

    async def judge(row: Row, sampling: SamplingParams) -> bool | None:
        nonlocal failed
        try:
            ((_, scored),) = await answers.answer(row, [sampling])
        except Exception as error:  # agents raise any exception; only this session fails
            if not settings.agent.is_given:
                raise
            if not failed:
                log.warning("an evaluated session failed, and counts as wrong: %s", error)
            failed += 1
            return False
        judged.append((row, scored))
        value = scored.values.get(right)
        return None if value is None else value >= found.right_from

    by_source = asyncio.run(evaluate(rows, found, sampling, judge, seed=settings.seed))
    out = Path(settings.out)
    failed += note_failures(out, step, judged, f"the evaluation of step {step}")
    result = EvaluationResult(
        step=step,
        weight_version=version,
        samples=found.samples,
        temperature=found.temperature,
        seconds=time.monotonic() - started,
        failed=failed,
        by_source=by_source,
    )
    write_json(out / "evaluations" / f"step-{step:06d}.json", result)
    return result.metrics()
