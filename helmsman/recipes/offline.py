"""Recipes on given answers: supervised fine-tuning and DPO. No rollouts, the same loop, data,
trackers and checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from helmsman import Job, Scheduler, TrainController
from helmsman.api.pairs import pair_samples
from helmsman.recipes.batches import train_metrics
from helmsman.recipes.examples import Encode, preferences, supervised
from helmsman.recipes.loop import Loop, is_due
from helmsman.recipes.prompts import ChatTokenizer, Dataset, Draws, Row, load_dataset
from helmsman.recipes.recipe import Recipe
from helmsman.recipes.reference import Reference
from helmsman.recipes.roles import learning_rate, make_trainer, reference_job, train_job
from helmsman.recipes.settings import DPOSettings, OfflineSettings, RunSettings, SFTSettings
from helmsman.recipes.trackers import Trackers


class OfflineLoop(Loop):
    """A run on rows that have their samples; a recipe says how a batch of them is trained on and
    judged.

    Args:
        settings: of the run.
        dataset: rows with ``samples``.
        trainer: of the policy.
        trackers: where metrics go.
    """

    def __init__(
        self,
        settings: OfflineSettings,
        dataset: Dataset,
        trainer: TrainController,
        trackers: Trackers,
    ) -> None:
        draws = Draws(
            dataset.train, num_samples=1, seed=settings.seed, shuffle=settings.data.shuffle
        )
        super().__init__(settings, trainer, draws, trackers)
        self.settings, self.dataset = settings, dataset

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
            samples = self.samples([draw.row for draw in drawn[begin : begin + size]])
            num_tokens += sum(len(sample["input_ids"]) for sample in samples)
            with self.clock.phase("train"):
                every.append(self.trainer.train_batch(samples, *self.loss()))
        metrics = {
            **train_metrics(every),
            "epoch": self.draws.epoch,
            "optimizer_steps": float(len(every)),
        }
        return {**metrics, "tokens_per_second": num_tokens / (time.monotonic() - started)}

    def evaluate(self, step: int) -> dict[str, float]:
        """Judge the held-out rows."""
        with self.clock.phase("evaluate"):
            samples = self.samples(self.dataset.held_out)
            return self.judge(samples, self.trainer.forward(samples))

    def evaluation_is_due(self, step: int) -> bool:
        """Whether there are held-out rows and the settings ask for an evaluation at this step."""
        if not self.dataset.held_out:
            return False
        return is_due(
            step, every=self.settings.evaluate_every, last=self.settings.steps, at_start=True
        )

    def samples(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the training samples of rows."""
        return [sample for row in rows for sample in row.samples]

    def loss(self) -> tuple[str, dict[str, Any]]:
        """Return name and arguments of the loss."""
        return "sft", {}

    def judge(
        self, samples: Sequence[Mapping[str, Any]], logprobs: Sequence[Any]
    ) -> dict[str, float]:
        """Return metrics of held-out samples from the policy's log-probabilities."""
        total = sum(map(_log_likelihood, samples, logprobs))
        return {
            "eval/loss": -total / max(1, sum(sum(sample["loss_mask"][1:]) for sample in samples))
        }


class PreferenceLoop(OfflineLoop):
    """DPO: pairs of samples, and the log-probabilities of the reference.

    Args:
        reference: the frozen model of the start.
    """

    def __init__(
        self,
        settings: DPOSettings,
        dataset: Dataset,
        trainer: TrainController,
        reference: Reference,
        trackers: Trackers,
    ) -> None:
        super().__init__(settings, dataset, trainer, trackers)
        self._dpo, self.reference = settings, reference

    def samples(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return pairs with the reference's log-probabilities."""
        found = pair_samples([(row.samples[0], row.samples[1]) for row in rows])
        with self.clock.phase("reference"):
            logprobs = self.reference.logprobs(found)
        return [
            {**sample, "ref_logprobs": each} for sample, each in zip(found, logprobs, strict=True)
        ]

    def loss(self) -> tuple[str, dict[str, Any]]:
        """Return name and arguments of the loss."""
        return "dpo", {"beta": self._dpo.beta, "loss_type": self._dpo.loss_type}

    def judge(
        self, samples: Sequence[Mapping[str, Any]], logprobs: Sequence[Any]
    ) -> dict[str, float]:
        """Return accuracy and margin: how often, and by how much, the preferred answer has the
        greater reward."""
        rewards = [
            self._dpo.beta
            * (_log_likelihood(sample, own) - _log_likelihood(sample, sample["ref_logprobs"]))
            for sample, own in zip(samples, logprobs, strict=True)
        ]
        margins = [
            chosen - rejected for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)
        ]
        return {
            "eval/accuracy": statistics.fmean(margin > 0 for margin in margins),
            "eval/reward_margin": statistics.fmean(margins),
        }


def _log_likelihood(sample: Mapping[str, Any], logprobs: Any) -> float:
    """Return the summed log-probabilities of the tokens that count; the first token never does."""
    pairs = zip(sample["loss_mask"][1:], logprobs.tolist()[1:], strict=True)
    return float(sum(each for counts, each in pairs if counts))


class SFT(Recipe[SFTSettings]):
    """Fine-tune a language model on given answers.

        SFT(model="models/qwen", data="chats.jsonl", steps=200).train()

    Args:
        model: local Hugging Face folder to start from.
        data: rows with ``messages``, ``text``, ``input_ids``, or a prompt with an answer; see
            Recipe.
        settings: as of Recipe.

    Raises: as Recipe.
    """

    kind: ClassVar[type[RunSettings]] = SFTSettings
    fixed: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "batch_size")

    def encoder(self, tokenizer: ChatTokenizer) -> Encode:
        """Return the encoder of the rows."""
        return supervised(self.settings.data, tokenizer)

    def load_data(self) -> Dataset:
        """Read tokenizer and rows. Raises: ValueError, OSError, BackendNotInstalledError."""
        settings = self.settings
        tokenizer = ChatTokenizer(settings.model, settings.data)
        return load_dataset(
            settings.data, tokenizer, settings.seed, self.rows, self.encoder(tokenizer)
        )

    def jobs(self) -> list[Job]:
        """Return the trainer."""
        return [train_job(self.settings)]

    def start(
        self, held: contextlib.ExitStack, scheduler: Scheduler, jobs: Mapping[str, Job]
    ) -> Callable[[Trackers], Loop]:
        """Start the trainer."""
        trainer = held.enter_context(make_trainer(self.settings, scheduler, jobs["train"]))
        return lambda trackers: OfflineLoop(self.settings, self.dataset, trainer, trackers)


class DPO(Recipe[DPOSettings]):
    """Train a language model on preferences by DPO, without a reward model.

        DPO(model="models/qwen", data="pairs.jsonl", beta=0.1, steps=200).train()

    Args:
        model: local Hugging Face folder to start from, which is also the reference.
        data: rows with a prompt, ``chosen`` and ``rejected``; see Recipe.
        settings: as of Recipe.

    Raises: as Recipe.
    """

    kind: ClassVar[type[RunSettings]] = DPOSettings
    fixed: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "batch_size")

    def load_data(self) -> Dataset:
        """Read tokenizer and rows. Raises: ValueError, OSError, BackendNotInstalledError."""
        settings = self.settings
        tokenizer = ChatTokenizer(settings.model, settings.data)
        encode = preferences(settings.data, tokenizer)
        return load_dataset(settings.data, tokenizer, settings.seed, self.rows, encode)

    def jobs(self) -> list[Job]:
        """Return trainer and reference."""
        return [train_job(self.settings), reference_job(self.settings)]

    def start(
        self, held: contextlib.ExitStack, scheduler: Scheduler, jobs: Mapping[str, Job]
    ) -> Callable[[Trackers], Loop]:
        """Start trainer and reference."""
        settings = self.settings
        trainer = held.enter_context(make_trainer(settings, scheduler, jobs["train"]))
        ranks = held.enter_context(make_trainer(settings, scheduler, jobs["reference"]))
        reference = Reference(ranks, settings.checkpoints.max_recoveries, takes_turns=False)
        return lambda trackers: PreferenceLoop(settings, self.dataset, trainer, reference, trackers)
