"""The loop of GRPO: generate, score, train, sync weights, evaluate."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman import (
    BoundedStaleness,
    DeviceHandoff,
    HelmsmanError,
    RolloutController,
    SamplingParams,
    TrainController,
    WorkflowExecutor,
)
from helmsman.agents.samples import Sample
from helmsman.recipes.answers import Answers
from helmsman.recipes.batches import (
    Answer,
    Group,
    logprob_differences,
    loss_arguments,
    make_samples,
    overlong_cost,
    rollout_metrics,
    train_metrics,
    with_weights,
)
from helmsman.recipes.critic import CriticModel
from helmsman.recipes.evaluation import EvaluationResult, evaluate
from helmsman.recipes.failures import FILE, Judged, note_failures
from helmsman.recipes.files import append_line, rewind, write_json
from helmsman.recipes.loop import Loop, is_due
from helmsman.recipes.prompts import Dataset, Draw, Draws, Row
from helmsman.recipes.reference import Reference
from helmsman.recipes.roles import learning_rate, make_sync
from helmsman.recipes.samples import SampleRow
from helmsman.recipes.scorer import Scored
from helmsman.recipes.settings import AGENT_REWARD, GRPOSettings, name_of
from helmsman.recipes.tokens import ChatTokenizer
from helmsman.recipes.trackers import Trackers
from helmsman.recipes.weight_check import Differences, WeightCheck

log = logging.getLogger(__name__)

_MOST_COMPARED = 16
"""Answers per step whose log-probabilities are compared with the trainer's."""


class NothingToLearnError(HelmsmanError):
    """Dynamic sampling discarded too many prompts in a row."""


class Run(Loop):
    """The loop of GRPO and PPO on started workers.

    Args:
        settings: The settings of the run.
        dataset: Prompts to train and evaluate on.
        tokenizer: The tokenizer of the model.
        trainer: The controller of the policy.
        rollout: The controller of the rollout instances.
        reference: The frozen initial model; None without a KL term.
        critic: The value model of PPO; None without one.
        answers: Answers prompts, and computes their rewards.
        trackers: Receivers of metrics.
    """

    def __init__(
        self,
        settings: GRPOSettings,
        dataset: Dataset,
        tokenizer: ChatTokenizer,
        trainer: TrainController,
        rollout: RolloutController,
        reference: Reference | None,
        critic: CriticModel | None,
        answers: Answers,
        trackers: Trackers,
    ) -> None:
        draws = Draws(
            dataset.train,
            num_samples=settings.samples_per_prompt,
            seed=settings.seed,
            shuffle=settings.data.shuffle,
        )
        super().__init__(settings, trainer, draws, trackers)
        self.settings, self.dataset, self.tokenizer = settings, dataset, tokenizer
        self.rollout, self.reference, self.answers = rollout, reference, answers
        self.critic = critic
        self.sampling = msgspec.structs.replace(
            settings.sampling, stop_token_ids=tokenizer.stop_ids
        )
        self.right = settings.evaluation.reward or (
            name_of(settings.rewards[0]) if settings.rewards else AGENT_REWARD
        )
        self.sync = make_sync(settings, trainer, rollout)
        # Over-sampled episodes may have open requests when a batch is complete: hold them until the
        # instances have the devices again.
        self.turns = (
            DeviceHandoff(trainer, rollout, self.sync, hold_requests=True)
            if settings.cluster.takes_turns
            else None
        )
        """Hands shared devices over; None when trainer and rollout have their own. The trainer owns
        them between steps, for checkpoints.
        """
        rows = [*dataset.held_out, *dataset.train][: settings.check.prompts]
        self.check = (
            WeightCheck([row.prompt_ids for row in rows], settings.check)
            if settings.check.weights
            else None
        )
        self.executor: WorkflowExecutor | None = None
        self._used: list[Draw] = []
        """Draws that were used since the last checkpoint."""
        self._recorded: list[Draw] = []
        """Draws that the last checkpoint has recorded as used."""
        self.num_filtered = 0
        """Prompts that dynamic sampling discarded since the last batch."""

    # --- the loop ---------------------------------------------------------------------------------

    def train(self) -> None:
        """Run all steps after the last checkpoint, which the trainer loads onto the devices."""
        if self.turns is not None:
            self.turns.to_training()
        super().train()

    def begin(self, step: int) -> None:
        """Prepare the next step, and send the trainer's weights to the instances."""
        super().begin(step)
        rewind(self.out / FILE, step - 1)
        if self.critic is not None and (folder := self.saved()) is not None:
            self.critic.load(folder)
        self.num_filtered = 0
        self._used = []
        self.answers.begin(step)
        if self.turns is None:
            self.sync.push()

    def others(self) -> Sequence[TrainController]:
        """Return the critic, whose state in a checkpoint is of the same step as the trainer's."""
        return () if self.critic is None else (self.critic.ranks,)

    def add_files(self, folder: Path) -> None:
        """Add the critic to a checkpoint, and drop answers that the one before has recorded."""
        super().add_files(folder)
        self.answers.forget(self._recorded)
        self._recorded, self._used = self._used, []
        if self.critic is not None:
            self.critic.save(folder)

    def end_step(self) -> None:
        """Hand shared devices back to the trainer, for a checkpoint and the next step."""
        if self.turns is not None:
            with self.clock.phase("hand_over"):
                self.turns.to_training()

    def train_step(self, step: int) -> dict[str, float]:
        """Generate and score answers, run the optimizer steps, and sync the weights."""
        clock, settings = self.clock, self.settings
        started = time.monotonic()
        self._to_rollout()
        with clock.phase("generate"):
            groups, failures = self._without_failed(step, self.next_groups(step))
        checked: dict[str, float] = {}
        if self.turns is not None:  # instances and trainer have the same weights now
            answers = self.check.ask(self.rollout) if self.check is not None else {}
            with clock.phase("hand_over"):
                self.turns.to_training()
            if self.check is not None:
                checked = self._compare(self.check.compare(self.trainer, answers), step)

        version = self.trainer.get_version()
        metrics = rollout_metrics(groups, version, self.right, settings.evaluation.right_from)
        metrics |= failures
        metrics["groups/filtered"], self.num_filtered = float(self.num_filtered), 0
        metrics["epoch"] = self.draws.epoch
        self.trackers.show(self.sample_log.log(step, self._sample_rows(step, groups)))
        samples = make_samples(groups, settings)
        metrics |= self._add_logprobs(samples, groups, version)
        if self.critic is not None:
            with clock.phase("critic"):
                scores = [
                    answer.reward
                    for group in groups
                    for answer in group.answers
                    for _ in answer.samples
                ]
                self.critic.judge(samples, scores)
        self.trainer.set_lr(learning_rate(settings, step))
        with clock.phase("train"):
            metrics |= self._optimize(samples)
        num_tokens = sum(len(sample["input_ids"]) for sample in samples)
        if self.turns is not None:
            metrics |= checked
        else:
            with clock.phase("sync"):
                metrics["sync/bytes"] = float(self.sync.push().num_bytes)
            if self.executor is not None:
                self.executor.set_version(step)
            if self.check is not None:
                with clock.phase("check"):
                    metrics |= self._compare(
                        self.check.compare(self.trainer, self.check.ask(self.rollout)), step
                    )
        metrics["tokens_per_second"] = num_tokens / (time.monotonic() - started)
        return metrics

    def _without_failed(
        self, step: int, groups: list[Group]
    ) -> tuple[list[Group], dict[str, float]]:
        """Leave out answers whose reward failed, and groups that have too few to compare.

        Returns:
            The groups, and metrics of what is left out.

        Raises:
            RewardFailedError: A reward failed that may not fail, or too many did.
        """
        judged = [each for group in groups for each in group.judged]
        num_failed = note_failures(self.out, step, judged, f"the batch of step {step}")
        least = 1 if self.critic is not None else 2
        kept = [each for each in (group.scored for group in groups) if len(each.answers) >= least]
        dropped = float(len(groups) - len(kept))
        return kept, {"reward/failed": float(num_failed), "groups/failed": dropped}

    def _add_logprobs(
        self, samples: list[dict[str, Any]], groups: list[Group], version: int
    ) -> dict[str, float]:
        """Add the trainer's and the reference's log-probabilities to the samples, as configured."""
        settings, tokens = self.settings, [{"input_ids": sample["input_ids"]} for sample in samples]
        metrics: dict[str, float] = {}
        old = settings.algorithm.old_logprobs
        if settings.tracking.logprob_diff or old != "rollout":
            with self.clock.phase("logprobs"):
                every = 1 if old != "rollout" else -(-len(tokens) // _MOST_COMPARED)
                own = self.trainer.forward(tokens[::every])
            sampled = [
                each for group in groups for answer in group.answers for each in answer.samples
            ]
            metrics = logprob_differences(sampled[::every], own, version)
            if old != "rollout":
                for sample, logprobs in zip(samples, own, strict=True):
                    sample["logprobs" if old == "trainer" else "prox_logprobs"] = logprobs
        if self.reference is not None:
            with self.clock.phase("reference"):
                for sample, logprobs in zip(samples, self.reference.logprobs(tokens), strict=True):
                    sample["ref_logprobs"] = logprobs
        return metrics

    def _sample_rows(self, step: int, groups: list[Group]) -> list[SampleRow]:
        """Return the first answer of each group, with its reward."""

        def prompt_of(group: Group) -> str:
            sample = group.answers[0].samples[0]
            own = self.tokenizer.decode(sample.input_ids[: -len(sample.continuation)])
            return own if self.settings.agent.is_given else group.draw.row.prompt

        return [
            SampleRow(
                step=step,
                prompt=prompt_of(group),
                completion=self.tokenizer.decode(group.answers[0].samples[0].continuation),
                reward=group.answers[0].reward,
                values=group.answers[0].scored.values,
            )
            for group in groups[: self.settings.tracking.samples]
        ]

    def _to_rollout(self) -> None:
        """Hand shared devices to the instances, with the current weights."""
        if self.turns is not None:
            with self.clock.phase("hand_over"):
                self.turns.to_rollout()

    def _optimize(self, samples: list[dict[str, Any]]) -> dict[str, float]:
        """Run the optimizer steps of a step; minibatches without an unmasked token are skipped."""
        algorithm, num_parts = self.settings.algorithm, self.settings.train.minibatches
        every, values = [], dict[str, float]()
        for number in range(num_parts):  # agents' branches may make them differ in size by one
            begin, end = (len(samples) * each // num_parts for each in (number, number + 1))
            part = samples[begin:end]
            if any(any(sample["loss_mask"]) for sample in part):
                if self.critic is not None:
                    values = self.critic.train(part)
                every.append(
                    self.trainer.train_batch(
                        with_weights(part, self.settings), algorithm.loss, loss_arguments(algorithm)
                    )
                )
        return {
            **(train_metrics(every) if every else {}),
            **values,
            "optimizer_steps": float(len(every)),
        }

    def _compare(self, found: Differences, step: int) -> dict[str, float]:
        append_line(self.out / "checks.jsonl", {"step": step, **msgspec.structs.asdict(found)})
        return {"check/max_diff": found.max_diff, "check/mean_diff": found.mean_diff}

    # --- answers ----------------------------------------------------------------------------------

    def next_groups(self, step: int) -> list[Group]:
        """Return the groups of a step, which may have been generated during earlier steps.

        Raises:
            NothingToLearnError: Dynamic sampling discarded too many prompts in a row.
        """
        settings = self.settings
        if self.executor is None:
            batch_policy = BoundedStaleness(
                settings.rollout.staleness, keep=self._keep, oversample=settings.rollout.oversample
            )
            self.executor = WorkflowExecutor(
                self.episode,
                batch_policy=batch_policy,
                episode_timeout=settings.rollout.episode_timeout,
            )
            self.source = iter(self.draws)
        self.executor.set_version(step - 1)
        self.answers.set_step(step)
        groups = [
            episode.value
            for episode in self.executor.prepare_batch(self.source, settings.prompts_per_step)
        ]
        if self.num_filtered > self._most_filtered:
            raise NothingToLearnError(
                f"dynamic sampling discarded {self.num_filtered} prompts in a row, since "
                "all answers to each had the "
                "same reward. Use other prompts, raise samples_per_prompt or "
                "algorithm.max_filtered_batches "
                f"({settings.algorithm.max_filtered_batches}), or set algorithm.dynamic_sampling "
                "to false."
            )
        for group in groups:
            self._use(group.draw)
        return groups

    async def episode(self, draw: Draw) -> Group:
        """Generate and score all answers to a prompt."""
        samplings = [msgspec.structs.replace(self.sampling, seed=seed) for seed in draw.seeds]

        def answer(samples: list[Sample], scored: Scored) -> Answer:
            made = Answer(samples, scored, scored.total)
            cost = overlong_cost(
                made.num_tokens, self.settings.algorithm, self.sampling.max_new_tokens
            )
            return msgspec.structs.replace(made, reward=scored.total - cost)

        outcomes = await self.answers.answer(draw.row, samplings, draw)
        return Group(draw, [answer(*each) for each in outcomes])

    def _keep(self, episode: Any) -> bool:
        """Return whether a group is kept for training; called in the episodes' thread."""
        group: Group = episode.value
        # The batch counts failed rewards, so it gets all groups that have some.
        has_failed = any(scored.failures for _, scored in group.judged)
        filters = self.settings.algorithm.dynamic_sampling and not has_failed
        is_of_use = not (filters and group.is_uniform)
        if is_of_use or self.num_filtered > self._most_filtered:
            # Keep the group, so that the batch completes and next_groups() raises.
            return True
        self._use(group.draw)
        self.num_filtered += 1
        return False

    def _use(self, draw: Draw) -> None:
        """Mark a draw as used; its kept answers are needed until a checkpoint records that."""
        self.draws.use(draw.number)
        self._used.append(draw)

    @property
    def _most_filtered(self) -> int:
        return self.settings.algorithm.max_filtered_batches * self.settings.prompts_per_step

    def close(self) -> None:
        """Cancel generation for later steps."""
        executor, self.executor = self.executor, None
        if executor is not None:
            executor.close()

    # --- evaluation -------------------------------------------------------------------------------

    def evaluation_is_due(self, step: int) -> bool:
        """Return whether there are held-out rows and this step ends with an evaluation."""
        found = self.settings.evaluation
        has_rows = bool(self.dataset.held_out)
        return has_rows and is_due(
            step, every=found.every, last=self.settings.steps, at_start=found.at_start
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Answer the held-out prompts with the current weights, and write the results."""
        settings = self.settings.evaluation
        sampling = msgspec.structs.replace(
            self.sampling,
            max_new_tokens=settings.max_new_tokens or self.settings.rollout.max_new_tokens,
        )

        failed, judged = 0, list[Judged]()

        async def judge(row: Row, sampling: SamplingParams) -> bool | None:
            nonlocal failed
            try:
                ((_, scored),) = await self.answers.answer(row, [sampling])
            except Exception as error:  # agents raise any exception; only this session fails
                if not self.settings.agent.is_given:
                    raise
                if not failed:
                    log.warning("an evaluated session failed, and counts as wrong: %s", error)
                failed += 1
                return False
            judged.append((row, scored))
            value = scored.values.get(self.right)
            return None if value is None else value >= settings.right_from

        self._to_rollout()
        with self.clock.phase("evaluate"):
            by_source = asyncio.run(
                evaluate(self.dataset.held_out, settings, sampling, judge, seed=self.settings.seed)
            )
        failed += note_failures(self.out, step, judged, f"the evaluation of step {step}")
        result = EvaluationResult(
            step=step,
            weight_version=self.trainer.get_version(),
            samples=settings.samples,
            temperature=settings.temperature,
            seconds=self.clock.seconds["evaluate"],
            failed=failed,
            by_source=by_source,
        )
        folder = self.out / "evaluations"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"step-{step:06d}.json", result)
        return result.metrics()
