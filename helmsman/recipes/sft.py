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
from helmsman.recipes.roles import learning_rate, make_trainer, train_job
from helmsman.recipes.run import RecipeRun, is_due
from helmsman.recipes.settings import RunSettings, SFTSettings
from helmsman.recipes.trackers import Trackers


def train(run: RecipeRun[SFTSettings], held_out: Sequence[Row]) -> None:
    """Run all steps after the last checkpoint; step 0 is the evaluation before training.

    Args:
        run: The run.
        held_out: Rows to evaluate on.
    """
    settings, trainer, clock = run.settings, run.trainer, run.clock
    for attempt in run.steps():
        with attempt as step:  # its end writes the checkpoint; a lost worker repeats steps
            metrics: dict[str, float] = {}
            with clock.phase("step"):
                if step:
                    rows = run.draw_rows(settings.batch_size)
                    trainer.set_lr(learning_rate(settings, step))
                    with clock.phase("train"):
                        parts = split(rows, settings.train.minibatches)
                        stats = [trainer.train_batch(samples_of(part), "sft") for part in parts]
                    num_tokens = sum(len(sample["input_ids"]) for sample in samples_of(rows))
                    metrics = {**train_metrics(stats), "epoch": run.draws.epoch}
                    metrics["tokens_per_second"] = num_tokens / clock.elapsed_s
                if held_out and is_due(step, every=settings.evaluate_every, last=settings.steps):
                    with clock.phase("evaluate"):
                        samples = samples_of(held_out)
                        metrics["eval/loss"] = mean_loss(samples, trainer.forward(samples))
            run.log(step, metrics)
    run.export_model()


def samples_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the training samples of rows."""
    return [sample for row in rows for sample in row.samples]


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
        """Return the job of the trainer."""
        return [train_job(self.settings)]

    def start(
        self, held: contextlib.ExitStack, scheduler: Scheduler, jobs: Mapping[str, Job]
    ) -> Callable[[Trackers], None]:
        """Start the trainer."""
        settings, dataset = self.settings, self.dataset
        trainer = held.enter_context(make_trainer(settings, scheduler, jobs["train"]))
        return lambda trackers: train(
            RecipeRun(settings, trainer, dataset.train, trackers), dataset.held_out
        )
