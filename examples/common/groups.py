"""Groups of answers to the tasks of a GRPO step, and their rewards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from examples.common.settings import Settings
from examples.common.tasks import Task, TaskSet
from examples.common.tokens import Tokenizer
from helmsman import SamplingParams
from helmsman.api.generation import GenerationResult


class Draw(NamedTuple):
    """A task to answer several times, with a seed for each answer."""

    number: int
    """Position in the order in which the steps draw tasks."""
    task: Task
    seeds: list[int]


class Group(NamedTuple):
    """The answers to one task, which are compared with each other."""

    draw: int
    """Number of the draw."""
    prompt: list[int]
    answers: list[GenerationResult]
    rewards: list[float]


class GroupSource:
    """Draws tasks, and makes groups of their answers.

    Args:
        settings: Settings of the run.
        tasks: Tasks to draw from, with their verifier.
        tokenizer: Encodes prompts and decodes answers.
        max_new_tokens: Length limit of an answer.
    """

    def __init__(
        self, settings: Settings, tasks: TaskSet, tokenizer: Tokenizer, max_new_tokens: int
    ) -> None:
        self.settings, self.tasks, self.tokenizer = settings, tasks, tokenizer
        self.max_new_tokens = max_new_tokens

    def draw(self, step: int) -> list[Draw]:
        """Draw the tasks of a step.

        Each answer has a seed of its own, so it does not depend on the worker that generates it.
        """
        rng, group_size = self.rng(step), self.settings.samples_per_prompt
        tasks = rng.choices(self.tasks.train, k=self.settings.prompts_per_step)
        first = (step - self.settings.sft_steps - 1) * len(tasks)
        return [
            Draw(number, task, [rng.getrandbits(62) for _ in range(group_size)])
            for number, task in enumerate(tasks, first)
        ]

    def scored(self, draw: Draw, answers: Sequence[GenerationResult]) -> Group:
        """Score the answers to a task."""
        rewards = [self.score(draw.task, answer.token_ids) for answer in answers]
        return Group(
            draw.number, self.tokenizer.encode_prompt(draw.task.prompt), list(answers), rewards
        )

    def rng(self, step: int) -> random.Random:
        """Return the generator of a step, so that a resumed run draws the same tasks."""
        return random.Random(f"{self.settings.seed}/{step}")

    def sampling(self, temperature: float, seed: int) -> SamplingParams:
        """Return the parameters of one answer."""
        stop = (self.tokenizer.eos_id,)
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            stop_token_ids=stop,
            seed=seed,
        )

    def score(self, task: Task, token_ids: Sequence[int]) -> float:
        """Return the reward of an answer, by the task's own verifier."""
        return self.tasks.score(task, self.tokenizer.decode(token_ids))
