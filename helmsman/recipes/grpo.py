"""GRPO, with Dr. GRPO, DAPO and PPO, from top to bottom.

``GRPOLoop.train`` is the loop, and ``GRPOLoop.step`` a step: draw, generate, reward, advantages,
train, sync. Their lines call parts, which ``grpo_recipe.GRPO.start`` builds and wires.
"""

from __future__ import annotations

import dataclasses
import time

import msgspec

from helmsman import SamplingParams, TrainController
from helmsman.recipes.answers import Answers
from helmsman.recipes.batches import (
    Group,
    add_logprobs,
    loss_arguments,
    make_answer,
    make_samples,
    rollout_metrics,
    split,
    train_metrics,
    with_weights,
)
from helmsman.recipes.critic import CriticModel
from helmsman.recipes.devices import Devices
from helmsman.recipes.episodes import Episodes
from helmsman.recipes.evaluation import evaluate_answers
from helmsman.recipes.prompts import Draw, Row
from helmsman.recipes.reference import Reference
from helmsman.recipes.roles import learning_rate
from helmsman.recipes.run import RecipeRun, is_due
from helmsman.recipes.samples import log_samples
from helmsman.recipes.settings import GRPOSettings
from helmsman.recipes.teacher import Teacher
from helmsman.recipes.tokens import ChatTokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOLoop:
    """The loop of GRPO and PPO on started workers."""

    run: RecipeRun[GRPOSettings]
    """Steps that survive lost workers, timed phases, metrics and checkpoints."""
    trainer: TrainController
    """The policy."""
    devices: Devices
    """Shared devices and weights of trainer and instances, and the check of the weights."""
    episodes: Episodes
    """The batches: draws prompts, runs ``episode`` for each, and filters the groups."""
    answers: Answers
    """The instances with the rewards, or the sessions of an agent."""
    reference: Reference | None
    """The frozen initial model; None without a KL term."""
    teacher: Teacher | None
    """The larger model of on-policy distillation; None without one."""
    critic: CriticModel | None
    """The value model of PPO; None without one."""
    held_out: list[Row]
    """Prompts to evaluate on."""
    tokenizer: ChatTokenizer
    """The tokenizer of the model."""

    def train(self) -> None:
        """Run all steps after the last checkpoint; step 0 is the evaluation before training."""
        run, settings, found = self.run, self.run.settings, self.run.settings.evaluation
        self.devices.to_training()
        for attempt in run.steps():
            with attempt as step:  # its end writes the checkpoint; a lost worker repeats steps
                with run.clock.phase("step"):
                    metrics = self.step(step) if step else {}
                    if self.held_out and is_due(
                        step, every=found.every, last=settings.steps, at_start=found.at_start
                    ):
                        metrics |= self.evaluate(step)
                run.log(step, metrics)
        run.export_model()

    def step(self, step: int) -> dict[str, float]:
        """Train on the answers to some prompts, sync the weights, and return the metrics."""
        run, settings, trainer = self.run, self.run.settings, self.trainer
        clock, algorithm = run.clock, settings.algorithm

        # Draw, generate, reward.
        self.devices.to_rollout()
        with clock.phase("generate"):
            groups, metrics = self.episodes.batch(step, self.episode)
        metrics |= self.devices.to_training(check_of=step)
        metrics |= rollout_metrics(groups, trainer.get_version(), settings)
        run.trackers.show(log_samples(step, groups, settings, self.tokenizer))

        # Advantages: of the group, or of the critic.
        samples = make_samples(groups, settings)
        with clock.phase("logprobs"):
            metrics |= add_logprobs(samples, groups, trainer, settings)
        if self.reference is not None:
            with clock.phase("reference"):
                self.reference.add_logprobs(samples)
        if self.critic is not None:
            with clock.phase("critic"):
                self.critic.add_advantages(samples, groups)
        if self.teacher is not None:
            with clock.phase("teacher"):
                metrics |= self.teacher.teach(samples)

        # Train, by an optimizer step for each minibatch.
        trainer.set_lr(learning_rate(settings, step))
        stats, values = list[dict[str, float]](), dict[str, float]()
        with clock.phase("train"):
            for part in split(samples, settings.train.minibatches):
                if not any(any(sample["loss_mask"]) for sample in part):
                    continue
                if self.critic is not None:
                    values = self.critic.train(part)
                weighted = with_weights(part, settings)
                stats.append(
                    trainer.train_batch(weighted, algorithm.loss, loss_arguments(algorithm))
                )
        metrics |= train_metrics(stats) | values

        # Sync.
        metrics |= self.devices.sync(step)
        self.episodes.go_on(step)
        num_tokens = sum(len(sample["input_ids"]) for sample in samples)
        return {**metrics, "tokens_per_second": num_tokens / clock.elapsed_s}

    async def episode(self, draw: Draw) -> Group:
        """Generate the answers to a prompt, and reward them; many episodes run at once."""
        sampling, settings, started = self.sampling, self.run.settings, time.time()
        samplings = [msgspec.structs.replace(sampling, seed=seed) for seed in draw.seeds]
        outcomes = await self.answers.answer(draw.row, samplings, draw)
        answers = [make_answer(*each, settings) for each in outcomes]
        return Group(draw, answers, started, seconds=time.time() - started)

    def evaluate(self, step: int) -> dict[str, float]:
        """Answer the held-out prompts with the current weights, and return the metrics."""
        settings, version = self.run.settings, self.trainer.get_version()
        self.devices.to_rollout()
        with self.run.clock.phase("evaluate"):
            metrics = evaluate_answers(
                self.held_out, self.answers, settings, self.sampling, step=step, version=version
            )
        self.devices.to_training()
        return metrics

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of training, without a seed."""
        stop_ids = self.tokenizer.stop_ids
        return msgspec.structs.replace(self.run.settings.sampling, stop_token_ids=stop_ids)
