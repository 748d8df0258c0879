"""Evaluation on held-out prompts: greedy accuracy and pass@k, for each source of the data."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from helmsman import SamplingParams
from helmsman.recipes.prompts import Row
from helmsman.recipes.settings import Evaluation

Judge = Callable[[Row, SamplingParams], Awaitable[bool]]
"""Answers a prompt once; whether the answer is right."""

ALL = "all"
"""Name of the figures over all sources, where there are several."""


class SourceResult(msgspec.Struct, frozen=True, kw_only=True):
    """Of one source."""

    num_prompts: int
    greedy_accuracy: float | None = None
    """Share of prompts that were answered right without chance."""
    pass_at_k: dict[int, float] = {}
    """Probability that at least one of k answers is right, the mean over prompts."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Of one evaluation, as it is written to ``evaluations/step-000010.json``."""

    step: int
    weight_version: int
    samples: int
    """Answers to each prompt that pass@k is estimated from."""
    temperature: float
    seconds: float
    failed: int
    """Rewards that raised, took too long or lost their process; their answers count as wrong."""
    by_source: dict[str, SourceResult]

    def metrics(self) -> dict[str, float]:
        """``eval/greedy_accuracy``, ``eval/pass@1``, ...; where there are several sources, also
        ``eval/<source>/...``.
        """
        found = {"eval/reward/failed": float(self.failed)}
        for source, result in self.by_source.items():
            prefix = "eval" if source == ALL else f"eval/{source}"
            if result.greedy_accuracy is not None:
                found[f"{prefix}/greedy_accuracy"] = result.greedy_accuracy
            found |= {f"{prefix}/pass@{k}": value for k, value in result.pass_at_k.items()}
        return found


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k answers is right, from more of them: 1 -
    C(n - c, k) / C(n, k).

    Source: Chen et al., arXiv:2107.03374, eq. 1.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"{num_right} right of {num_samples} answers give no pass@{k}")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


async def evaluate(
    rows: Sequence[Row], settings: Evaluation, sampling: SamplingParams, judge: Judge, *, seed: int
) -> dict[str, SourceResult]:
    """Figures by source; with several sources also those of all.

    Args:
        rows: held-out prompts.
        sampling: length and stop tokens; how it samples is the settings' to say.
        seed: of what is drawn, the same at every evaluation.
    """
    greedy = msgspec.structs.replace(sampling, temperature=0.0, top_p=1.0, top_k=0, seed=0)
    drawn = msgspec.structs.replace(
        sampling, temperature=settings.temperature, top_p=settings.top_p, top_k=0
    )

    async def answer(number: int, row: Row) -> tuple[bool | None, list[bool]]:
        rng = random.Random(f"{seed}/evaluation {number}")
        asked = [
            judge(row, msgspec.structs.replace(drawn, seed=rng.getrandbits(31)))
            for _ in range(settings.samples)
        ]
        right = await asyncio.gather(*([judge(row, greedy)] if settings.greedy else []), *asked)
        return (right[0] if settings.greedy else None), right[bool(settings.greedy) :]

    answers = await asyncio.gather(*(answer(number, row) for number, row in enumerate(rows)))
    sources = sorted({row.source for row in rows})
    results = {}
    for source in [ALL, *(sources if len(sources) > 1 else [])]:
        chosen = [
            each for row, each in zip(rows, answers, strict=True) if source in (ALL, row.source)
        ]
        results[source] = SourceResult(
            num_prompts=len(chosen),
            greedy_accuracy=statistics.fmean(bool(first) for first, _ in chosen)
            if settings.greedy
            else None,
            pass_at_k={
                k: statistics.fmean(
                    pass_at_k(settings.samples, sum(right), k) for _, right in chosen
                )
                for k in (settings.k if settings.samples else ())
            },
        )
    return results
