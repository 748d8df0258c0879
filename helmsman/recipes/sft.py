"""Supervised fine-tuning (SFT) from top to bottom: draw rows, train, evaluate, log, checkpoint.

``train`` is the loop; ``SFT`` has its arguments, data and workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from helmsman import Job, Scheduler
from helmsman.recipes.batches import log_likelihood, split, train_metrics
from helmsman.recipes.prompts import Encode, Row, supervised
from helmsman.recipes.recipe import Recipe
from helmsman.recipes.reference import FrozenReference
from helmsman.recipes.roles import learning_rate, start_ranks, teacher_jobs, train_job
from helmsman.recipes.run import RecipeRun, is_due
from helmsman.recipes.settings import RunSettings, SFTSettings
from helmsman.recipes.teacher import Teacher
from helmsman.recipes.trackers import Trackers


def train(
    run: RecipeRun[SFTSettings], held_out: Sequence[Row], teacher: Teacher | None = None
) -> None:
    """Run all steps after the last checkpoint; step 0 is the evaluation before training.

    Args:
        run: The run.
        held_out: Rows to evaluate on.
        teacher: The larger model of distillation; None without one.
    """
    settings, trainer, clock = run.settings, run.trainer, run.clock
    mixed = {"direction": "forward", "hard": 1 - settings.teacher_coef}
    loss: tuple[Any, ...] = ("sft",) if teacher is None else ("distill", mixed)
    for attempt in run.steps():
        with attempt as step:  # its end writes the checkpoint; a lost worker repeats steps
            metrics: dict[str, float] = {}
            with clock.phase("step"):
                if step:
                    rows = run.draw_rows(settings.batch_size)
                    trainer.set_lr(learning_rate(settings, step))
                    stats, num_tokens = [], 0
                    for part in split(rows, settings.train.minibatches):
                        samples = samples_of(part)
                        if teacher is not None:
                            with clock.phase("teacher"):
                                teacher.teach(samples)
                        with clock.phase("train"):
                            stats.append(trainer.train_batch(samples, *loss))
                        num_tokens += sum(len(sample["input_ids"]) for sample in samples)
                    metrics = {**train_metrics(stats), "epoch": run.draws.epoch}
                    metrics["tokens_per_second"] = num_tokens / clock.elapsed_s
                if held_out and is_due(step, every=settings.evaluate_every, last=settings.steps):
                    with clock.phase("evaluate"):
                        samples = samples_of(held_out)
                        metrics["eval/loss"] = mean_loss(samples, trainer.forward(samples))
            run.log(step, metrics)
    run.export_model()


def samples_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return copies of the training samples of rows."""
    return [{**sample} for row in rows for sample in row.samples]


def mean_loss(samples: Sequence[Mapping[str, Any]], logprobs: Sequence[Any]) -> float:
    """Return the mean negative log-likelihood of a token.

    Args:
        samples: The samples.
        logprobs: The policy's log-probabilities of each sample's tokens, (T,) float32.
    """
    num_tokens = sum(sum(sample["loss_mask"][1:]) for sample in samples)
    return -sum(map(log_likelihood, samples, logprobs)) / max(1, num_tokens)


class SFT(Recipe[SFTSettings]):
    """Fine-tune a language model on given answers.

        SFT(model="models/qwen", data="chats.jsonl", steps=200).train()

    Args:
        model: Local Hugging Face folder of the initial model.
        data: Rows with ``messages``, ``text``, ``input_ids``, or a prompt with an answer; see
            Recipe.
        settings: The other arguments of Recipe, and keys of SFTSettings.

    Raises:
        ValueError: Settings are invalid or do not fit together.
        OSError: The configuration cannot be read.
        BackendNotInstalledError: The configuration needs a package that is missing.
    """

    kind: ClassVar[type[RunSettings]] = SFTSettings
    fixed: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "batch_size")

    @property
    def encoder(self) -> Encode:
        """The encoder of rows with answers."""
        return supervised

    def jobs(self) -> list[Job]:
        """Return the jobs of the trainer and, with one, the teacher."""
        return [train_job(self.settings), *teacher_jobs(self.settings)]

    def start(
        self, held: contextlib.ExitStack, scheduler: Scheduler, jobs: Mapping[str, Job]
    ) -> Callable[[Trackers], None]:
        """Start trainer and teacher."""
        settings, dataset = self.settings, self.dataset
        ranked = start_ranks(settings, scheduler, jobs)
        teacher: Teacher | None = None
        if "teacher" in ranked:
            found = FrozenReference(ranked["teacher"], settings)
            teacher = Teacher(found, 1.0, settings.teacher_top_k, self.num_teacher_ids)
        return lambda trackers: train(
            RecipeRun(settings, ranked["train"], dataset.train, trackers), dataset.held_out, teacher
        )
