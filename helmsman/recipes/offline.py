"""The recipes SFT and DPO, which train on given answers without rollouts."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from helmsman import Job, Scheduler, TrainController
from helmsman.api.pairs import pair_samples
from helmsman.recipes.batches import train_metrics
from helmsman.recipes.loop import Loop, is_due
from helmsman.recipes.prompts import Dataset, Draws, Row, load_dataset, preferences, supervised
from helmsman.recipes.recipe import Recipe
from helmsman.recipes.reference import Reference
from helmsman.recipes.roles import learning_rate, make_trainer, sibling_job, train_job
from helmsman.recipes.settings import DPOSettings, RunSettings, SFTSettings
from helmsman.recipes.tokens import ChatTokenizer
from helmsman.recipes.trackers import Trackers


class Objective(Protocol):
    """Loss, samples and metrics of a run on given answers."""

    loss: tuple[str, dict[str, Any]]
    """Name and arguments of the loss."""

    def samples(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the training samples of rows."""

    def judge(
        self, samples: Sequence[Mapping[str, Any]], logprobs: Sequence[Any]
    ) -> dict[str, float]:
        """Return metrics of held-out samples.

        Args:
            samples: Samples as ``samples`` returns them.
            logprobs: The policy's log-probabilities of each sample's tokens, (T,) float32.
        """


class Imitation:
    """SFT: maximum likelihood of the given answers."""

    loss: tuple[str, dict[str, Any]] = ("sft", {})

    def samples(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """See Objective."""
        return [sample for row in rows for sample in row.samples]

    def judge(
        self, samples: Sequence[Mapping[str, Any]], logprobs: Sequence[Any]
    ) -> dict[str, float]:
        """Return the loss: the mean negative log-likelihood of a token."""
        total = sum(map(_log_likelihood, samples, logprobs))
        return {"eval/loss": -total / max(1, sum(sum(each["loss_mask"][1:]) for each in samples))}


class Preference:
    """DPO: pairs of samples with the reference's log-probabilities.

    Args:
        settings: The settings of the run.
        reference: The frozen initial model.
    """

    def __init__(self, settings: DPOSettings, reference: Reference) -> None:
        self._beta, self._reference = settings.beta, reference
        self.loss = ("dpo", {"beta": settings.beta, "loss_type": settings.loss_type})

    def samples(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """See Objective. Adds the reference's log-probabilities as ``ref_logprobs``."""
        found = pair_samples([(row.samples[0], row.samples[1]) for row in rows])
        logprobs = self._reference.logprobs(found)
        return [{**each, "ref_logprobs": ref} for each, ref in zip(found, logprobs, strict=True)]

    def judge(
        self, samples: Sequence[Mapping[str, Any]], logprobs: Sequence[Any]
    ) -> dict[str, float]:
        """Return accuracy and margin of the implicit rewards of preferred over rejected answers."""
        rewards = [
            _log_likelihood(sample, own) - _log_likelihood(sample, sample["ref_logprobs"])
            for sample, own in zip(samples, logprobs, strict=True)
        ]
        pairs = zip(rewards[::2], rewards[1::2], strict=True)
        margins = [self._beta * (chosen - rejected) for chosen, rejected in pairs]
        return {
            "eval/accuracy": statistics.fmean(margin > 0 for margin in margins),
            "eval/reward_margin": statistics.fmean(margins),
        }


class OfflineLoop(Loop):
    """The loop of SFT and DPO.

    Args:
        settings: The settings of the run.
        dataset: Rows with ``samples``.
        trainer: The controller of the policy.
        objective: Loss, samples and metrics.
        trackers: Receivers of metrics.
    """

    def __init__(
        self,
        settings: SFTSettings | DPOSettings,
        dataset: Dataset,
        trainer: TrainController,
        objective: Objective,
        trackers: Trackers,
    ) -> None:
        shuffle = settings.data.shuffle
        draws = Draws(dataset.train, num_samples=1, seed=settings.seed, shuffle=shuffle)
        super().__init__(settings, trainer, draws, trackers)
        self.settings, self.dataset, self.objective = settings, dataset, objective

    def train_step(self, step: int) -> dict[str, float]:
        """Take the optimizer steps on the next rows."""
        started = time.monotonic()
        settings = self.settings
        drawn = list(itertools.islice(self.draws, settings.batch_size))
        for draw in drawn:
            self.draws.use(draw.number)
        self.trainer.set_lr(learning_rate(settings, step))
        size = settings.batch_size // settings.train.minibatches
        every, num_tokens = [], 0
        for begin in range(0, settings.batch_size, size):
            with self.clock.phase("samples"):
                rows = [draw.row for draw in drawn[begin : begin + size]]
                samples = self.objective.samples(rows)
            num_tokens += sum(len(sample["input_ids"]) for sample in samples)
            with self.clock.phase("train"):
                every.append(self.trainer.train_batch(samples, *self.objective.loss))
        return {
            **train_metrics(every),
            "epoch": self.draws.epoch,
            "optimizer_steps": float(len(every)),
            "tokens_per_second": num_tokens / (time.monotonic() - started),
        }

    def evaluate(self, step: int) -> dict[str, float]:
        """Compute metrics of the held-out rows."""
        with self.clock.phase("evaluate"):
            samples = self.objective.samples(self.dataset.held_out)
            return self.objective.judge(samples, self.trainer.forward(samples))

    def evaluation_is_due(self, step: int) -> bool:
        """Return whether there are held-out rows and this step ends with an evaluation."""
        settings, has_rows = self.settings, bool(self.dataset.held_out)
        return has_rows and is_due(
            step, every=settings.evaluate_every, last=settings.steps, at_start=True
        )


def _log_likelihood(sample: Mapping[str, Any], logprobs: Any) -> float:
    """Sum the log-probabilities of unmasked tokens; the first token has none."""
    pairs = zip(sample["loss_mask"][1:], logprobs.tolist()[1:], strict=True)
    return float(sum(each for counts, each in pairs if counts))


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

    def load_data(self) -> Dataset:
        """Read tokenizer and rows.

        Raises:
            ValueError: The tokenizer or a row is invalid.
            OSError: A file cannot be read.
            BackendNotInstalledError: A package is missing.
        """
        settings = self.settings
        self.tokenizer = ChatTokenizer(settings.model, settings.data)
        return load_dataset(settings.data, self.tokenizer, settings.seed, self.rows, supervised)

    def jobs(self) -> list[Job]:
        """Return the job of the trainer."""
        return [train_job(self.settings)]

    def start(
        self, held: contextlib.ExitStack, scheduler: Scheduler, jobs: Mapping[str, Job]
    ) -> Callable[[Trackers], Loop]:
        """Start the trainer."""
        trainer = held.enter_context(make_trainer(self.settings, scheduler, jobs["train"]))
        return lambda trackers: OfflineLoop(
            self.settings, self.dataset, trainer, Imitation(), trackers
        )


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

    def load_data(self) -> Dataset:
        """Read tokenizer and rows.

        Raises:
            ValueError: The tokenizer or a row is invalid.
            OSError: A file cannot be read.
            BackendNotInstalledError: A package is missing.
        """
        settings = self.settings
        self.tokenizer = ChatTokenizer(settings.model, settings.data)
        return load_dataset(settings.data, self.tokenizer, settings.seed, self.rows, preferences)

    def jobs(self) -> list[Job]:
        """Return the jobs of trainer and reference."""
        return [train_job(self.settings), sibling_job(self.settings, "reference")]

    def start(
        self, held: contextlib.ExitStack, scheduler: Scheduler, jobs: Mapping[str, Job]
    ) -> Callable[[Trackers], Loop]:
        """Start trainer and reference."""
        settings = self.settings
        trainer = held.enter_context(make_trainer(settings, scheduler, jobs["train"]))
        ranks = held.enter_context(make_trainer(settings, scheduler, jobs["reference"]))
        reference = Reference(ranks, settings.checkpoints.max_recoveries, takes_turns=False)
        return lambda trackers: OfflineLoop(
            settings, self.dataset, trainer, Preference(settings, reference), trackers
        )
