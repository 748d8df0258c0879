"""Episodes: drawn prompts with their rewarded answers, generated ahead where staleness allows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from helmsman import BoundedStaleness, HelmsmanError, WorkflowExecutor
from helmsman.recipes.answers import Answers
from helmsman.recipes.batches import Group
from helmsman.recipes.failures import note_failures
from helmsman.recipes.prompts import Draw, Draws
from helmsman.recipes.recorded import RolloutFiles
from helmsman.recipes.settings import GRPOSettings


class NothingToLearnError(HelmsmanError):
    """Dynamic sampling discarded too many prompts in a row."""


class Episodes:
    """The batches of groups, without groups that dynamic sampling or failed rewards leave out.

    Args:
        settings: The settings of the run.
        draws: The order of the prompts.
        answers: The answers, which are kept until a checkpoint has recorded that they were used.
        recording: Writes the groups, or has those of another run, as the settings ask for.
    """

    def __init__(
        self, settings: GRPOSettings, draws: Draws, answers: Answers, recording: RolloutFiles
    ) -> None:
        self._settings, self._draws, self._answers = settings, draws, answers
        self._recording = recording
        self._executor: WorkflowExecutor | None = None
        self._source: Iterator[Draw] = iter(())
        self._used: list[Draw] = []
        """Draws that were used since the last checkpoint."""
        self._recorded: list[Draw] = []
        """Draws that the last checkpoint has recorded as used."""
        self._num_filtered = 0
        """Prompts that dynamic sampling discarded since the last batch."""
        self._most_filtered = settings.algorithm.max_filtered_batches * settings.prompts_per_step

    def begin(self, step: int, checkpoint: Path | None) -> None:
        """Drop all episodes; see Part."""
        self.close()
        self._recording.begin(step)
        self._num_filtered, self._used = 0, []
        self._answers.begin(step)

    def save(self, folder: Path) -> None:
        """Drop answers that the checkpoint before this one has recorded; see Part."""
        self._answers.forget(self._recorded)
        self._recorded, self._used = self._used, []

    def batch(
        self, step: int, episode: Callable[[Draw], Awaitable[Group]]
    ) -> tuple[list[Group], dict[str, float]]:
        """Return the groups of a step, which may have been generated during earlier steps.

        Args:
            step: Number of the step.
            episode: Answers a prompt and rewards the answers; many run at once, in a thread.

        Returns:
            The groups, and metrics of what was left out.

        Raises:
            NothingToLearnError: Dynamic sampling discarded too many prompts in a row.
            RewardFailedError: A reward failed that may not fail, or too many did.
            RecordingError: The recorded groups are damaged, or do not fit the run.
        """
        settings, rollout = self._settings, self._settings.rollout
        if rollout.is_recorded:
            return self._recording.read(step, self._draws)
        if self._executor is None:
            policy = BoundedStaleness(
                rollout.staleness, keep=self._keep, oversample=rollout.oversample
            )
            self._executor = WorkflowExecutor(
                episode, batch_policy=policy, episode_timeout=rollout.episode_timeout
            )
            self._source = iter(self._draws)
        self._executor.set_version(step - 1)
        self._answers.set_step(step)
        found = self._executor.prepare_batch(self._source, settings.prompts_per_step)
        groups: list[Group] = [each.value for each in found]
        if self._num_filtered > self._most_filtered:
            raise NothingToLearnError(
                f"dynamic sampling discarded {self._num_filtered} prompts in a row, since all "
                "answers to each had the same reward. Use other prompts, raise samples_per_prompt "
                f"or algorithm.max_filtered_batches ({settings.algorithm.max_filtered_batches}), "
                "or set algorithm.dynamic_sampling to false."
            )
        for group in groups:
            self._use(group.draw)
        num_filtered, self._num_filtered = self._num_filtered, 0
        judged = [each for group in groups for each in group.judged]
        num_failed = note_failures(Path(settings.out), step, judged, f"the batch of step {step}")
        compares = settings.is_rewarded and settings.algorithm.preset != "ppo"
        least = 2 if compares else 1
        kept = [each for each in (group.scored for group in groups) if len(each.answers) >= least]
        metrics = {
            "reward/failed": float(num_failed),
            "groups/failed": float(len(groups) - len(kept)),
            "groups/filtered": float(num_filtered),
            "epoch": self._draws.epoch,
        }
        if rollout.record:
            self._recording.write(step, kept, metrics, self._draws.state())
        return kept, metrics

    def go_on(self, step: int) -> None:
        """Let episodes start that need the weights of a step; shared devices are not free yet."""
        if self._executor is not None and not self._settings.cluster.takes_turns:
            self._executor.set_version(step)

    def close(self) -> None:
        """Cancel generation for later steps. Idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    def _keep(self, episode: Any) -> bool:
        """Return whether a group is kept for training; called in the episodes' thread."""
        group: Group = episode.value
        # The batch counts failed rewards, so it gets all groups that have some.
        has_failed = any(scored.failures for _, scored in group.judged)
        filters = self._settings.algorithm.dynamic_sampling and not has_failed
        is_of_use = not (filters and group.is_uniform)
        if is_of_use or self._num_filtered > self._most_filtered:
            # Keep the group, so that the batch completes and batch() raises.
            return True
        self._use(group.draw)
        self._num_filtered += 1
        return False

    def _use(self, draw: Draw) -> None:
        """Mark a draw as used; its kept answers are needed until a checkpoint records that."""
        self._draws.use(draw.number)
        self._used.append(draw)
