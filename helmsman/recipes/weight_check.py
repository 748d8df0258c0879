"""Checks instances' weights: compares log-probabilities of greedy answers with the trainer's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from helmsman import (
    GenerationRequest,
    GenerationResult,
    HelmsmanError,
    RolloutController,
    SamplingParams,
    TrainController,
)
from helmsman.api.errors import WorkerFailedError
from helmsman.recipes.files import append_line
from helmsman.recipes.settings import Check

log = logging.getLogger(__name__)


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check, as written to checks.jsonl."""

    step: int
    weight_version: int
    max_diff: float
    """Largest absolute difference of a log-probability."""
    mean_diff: float
    num_tokens: int
    prompts: list[list[int]]
    answers: dict[str, list[list[int]]]
    """Instance -> tokens of its answers."""
    logprobs: dict[str, list[list[float]]]
    """Instance -> its log-probabilities of these tokens."""


class WeightsDifferError(HelmsmanError):
    """An instance's weights or log-probabilities differ from the trainer's."""


class WeightCheck:
    """Compares log-probabilities of greedy answers between every instance and the trainer.

    Args:
        prompts: Token ids of the prompts.
        settings: Length of the answers, and tolerance.
        path: File with a line for each check.
    """

    def __init__(self, prompts: Sequence[list[int]], settings: Check, path: Path) -> None:
        self._prompts, self._settings, self._path = list(prompts), settings, path
        self._num_asked = 0

    def ask(self, rollout: RolloutController) -> dict[str, list[GenerationResult]]:
        """Return the answers of every serving instance, without those that end meanwhile.

        Calls each instance directly, because the request queue would choose the instances.
        """
        self._num_asked += 1
        sampling = SamplingParams(max_new_tokens=self._settings.max_new_tokens, temperature=0.0)
        serving = [
            id_ for id_, instance in rollout.stats().instances.items() if instance.state.is_serving
        ]

        async def ask(worker_id: str) -> list[GenerationResult]:
            requests = [
                GenerationRequest(
                    request_id=f"check-{self._num_asked}-{index}",
                    prompt_ids=prompt,
                    sampling=sampling,
                )
                for index, prompt in enumerate(self._prompts)
            ]
            call = rollout.scheduler.async_call_engine
            results: list[GenerationResult] = await asyncio.gather(
                *(call(worker_id, "agenerate", rollout.engine_name, each) for each in requests)
            )
            return results

        async def ask_all() -> dict[str, list[GenerationResult]]:
            found = await asyncio.gather(*map(ask, serving), return_exceptions=True)
            answers = dict[str, list[GenerationResult]]()
            for worker, result in zip(serving, found, strict=True):
                if not isinstance(result, BaseException):
                    answers[worker] = result
                elif not isinstance(result, WorkerFailedError):  # its supervisor builds it again
                    raise result
            return answers

        return asyncio.run(ask_all())

    def compare(
        self, trainer: TrainController, answers: dict[str, list[GenerationResult]], step: int
    ) -> dict[str, float]:
        """Compare the answers' log-probabilities with the trainer's, and record the differences.

        Args:
            trainer: The controller of the policy.
            answers: Answers by instance, as ``ask`` returns them.
            step: Number of the step.

        Returns:
            Metrics of the differences; none where no instance has answered.

        Raises:
            WeightsDifferError: A difference exceeds the tolerance, or an instance serves another
                weight version.
        """
        if not answers:
            log.warning("no instance answered the check of the weights of step %d", step)
            return {}
        version = trainer.get_version()
        asked = [
            (worker, prompt, each)
            for worker in answers
            for prompt, each in zip(self._prompts, answers[worker], strict=True)
        ]
        own = trainer.forward([{"input_ids": prompt + each.token_ids} for _, prompt, each in asked])
        apart: list[float] = []
        for (worker, prompt, each), row in zip(asked, own, strict=True):
            if others := set(each.versions) - {version}:
                raise WeightsDifferError(
                    f"{worker} generated tokens with weight version {min(others)} after "
                    f"the update to {version} (check.weights)."
                )
            for at, (ours, theirs) in enumerate(
                zip(row.tolist()[len(prompt) :], each.logprobs, strict=True)
            ):
                apart.append(abs(ours - theirs))
                if not apart[-1] <= self._settings.tolerance:
                    raise WeightsDifferError(
                        f"{worker} and the trainer differ after the update to weight version "
                        f"{version}: token {at} of a greedy answer (id {each.token_ids[at]}) has "
                        f"the log-probability {theirs:.6f} in {worker} and {ours:.6f} in the "
                        f"trainer; the difference, {apart[-1]:.2e}, is above check.tolerance, "
                        f"{self._settings.tolerance:g}. Raise the tolerance for lower precision; "
                        "else check the engine's update_weights."
                    )
        found = Differences(
            step=step,
            weight_version=version,
            max_diff=max(apart, default=0.0),
            mean_diff=sum(apart) / max(1, len(apart)),
            num_tokens=len(apart),
            prompts=self._prompts,
            answers={
                worker: [each.token_ids for each in results] for worker, results in answers.items()
            },
            logprobs={
                worker: [each.logprobs for each in results] for worker, results in answers.items()
            },
        )
        append_line(self._path, found)
        return {"check/max_diff": found.max_diff, "check/mean_diff": found.mean_diff}
