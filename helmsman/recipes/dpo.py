"""DPO from top to bottom: draw pairs, add the reference's log-probabilities, train, evaluate, log.

``train`` is the loop; ``DPO`` has its arguments, data and workers.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from helmsman import Job, Scheduler
from helmsman.api.pairs import pair_samples
from helmsman.recipes.batches import log_likelihood, split, train_metrics
from helmsman.recipes.prompts import Encode, Row, preferences
from helmsman.recipes.recipe import Recipe
from helmsman.recipes.reference import Reference, make_reference
from helmsman.recipes.roles import learning_rate, sibling_job, start_ranks, train_job
from helmsman.recipes.run import RecipeRun, is_due
from helmsman.recipes.settings import DPOSettings, RunSettings
from helmsman.recipes.trackers import Trackers


def train(run: RecipeRun[DPOSettings], reference: Reference, held_out: Sequence[Row]) -> None:
    """Run all steps after the last checkpoint; step 0 is the evaluation before training.

    Args:
        run: The run.
        reference: The frozen initial model.
        held_out: Rows to evaluate on.
    """
    settings, trainer, clock = run.settings, run.trainer, run.clock
    loss = {"beta": settings.beta, "loss_type": settings.loss_type}
    for attempt in run.steps():
        with attempt as step:  # its end writes the checkpoint; a lost worker repeats steps
            metrics: dict[str, float] = {}
            with clock.phase("step"):
                if step:
                    rows = run.draw_rows(settings.batch_size)
                    trainer.set_lr(learning_rate(settings, step))
                    stats, num_tokens = [], 0
                    for part in split(rows, settings.train.minibatches):
                        with clock.phase("samples"):
                            pairs = pairs_of(part, reference)
                        with clock.phase("train"):
                            stats.append(trainer.train_batch(pairs, "dpo", loss))
                        num_tokens += sum(len(sample["input_ids"]) for sample in pairs)
                    metrics = {**train_metrics(stats), "epoch": run.draws.epoch}
                    metrics["tokens_per_second"] = num_tokens / clock.elapsed_s
                if held_out and is_due(step, every=settings.evaluate_every, last=settings.steps):
                    with clock.phase("evaluate"):
                        pairs = pairs_of(held_out, reference)
                        metrics |= preference(pairs, trainer.forward(pairs), settings.beta)
            run.log(step, metrics)
    run.export_model()


def pairs_of(rows: Sequence[Row], reference: Reference) -> list[dict[str, Any]]:
    """Return the samples of rows as pairs, with the reference's log-probabilities."""
    pairs = pair_samples([(row.samples[0], row.samples[1]) for row in rows])
    reference.add_logprobs(pairs)
    return pairs


def preference(
    pairs: Sequence[Mapping[str, Any]], logprobs: Sequence[Any], beta: float
) -> dict[str, float]:
    """Return accuracy and margin of the implicit rewards of preferred over rejected answers.

    Args:
        pairs: Samples with ``ref_logprobs``, preferred and rejected in turn.
        logprobs: The policy's log-probabilities of each sample's tokens, (T,) float32.
        beta: Factor of the implicit rewards.
    """
    rewards = [
        log_likelihood(sample, own) - log_likelihood(sample, sample["ref_logprobs"])
        for sample, own in zip(pairs, logprobs, strict=True)
    ]
    both = zip(rewards[::2], rewards[1::2], strict=True)
    margins = [beta * (chosen - rejected) for chosen, rejected in both]
    return {
        "eval/accuracy": statistics.fmean(margin > 0 for margin in margins),
        "eval/reward_margin": statistics.fmean(margins),
    }


class DPO(Recipe[DPOSettings]):
    """Train a language model on preferences by DPO, without a reward model.

        DPO(model="models/qwen", data="pairs.jsonl", beta=0.1, steps=200).train()

    Args:
        model: Local Hugging Face folder of the initial model, which is also the reference.
        data: Rows with a prompt, ``chosen`` and ``rejected``; see Recipe.
        settings: The other arguments of Recipe, and keys of DPOSettings.

    Raises:
        ValueError: Settings are invalid or do not fit together.
        OSError: The configuration cannot be read.
        BackendNotInstalledError: The configuration needs a package that is missing.
    """

    kind: ClassVar[type[RunSettings]] = DPOSettings
    fixed: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "batch_size")

    @property
    def encoder(self) -> Encode:
        """The encoder of rows with pairs."""
        return preferences

    def jobs(self) -> list[Job]:
        """Return the jobs of trainer and reference; adapters have their base model for one."""
        jobs = [train_job(self.settings)]
        if self.settings.train.lora is None:
            jobs.append(sibling_job(self.settings, "reference"))
        return jobs

    def start(
        self, held: contextlib.ExitStack, scheduler: Scheduler, jobs: Mapping[str, Job]
    ) -> Callable[[Trackers], None]:
        """Start trainer and reference."""
        settings, dataset = self.settings, self.dataset
        ranked = start_ranks(settings, scheduler, jobs)
        reference = make_reference(ranked, settings)
        return lambda trackers: train(
            RecipeRun(settings, ranked["train"], dataset.train, trackers),
            reference,
            dataset.held_out,
        )
