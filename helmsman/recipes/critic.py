"""The critic of PPO: a value model, and the advantages computed from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helmsman import TrainController
from helmsman.api.advantages import gae, whiten
from helmsman.api.reward_shaping import token_rewards
from helmsman.recipes.batches import Group
from helmsman.recipes.reference import awake
from helmsman.recipes.settings import GRPOSettings

FOLDER = "critic"
"""Folder of a checkpoint with the state of the critic."""
_COLUMNS = ("input_ids", "loss_mask", "values", "returns")
"""Columns that the critic learns from."""


class CriticModel:
    """Estimates the value of each token, and learns from the returns.

    Args:
        ranks: The controller of the value model.
        settings: The settings of the run. Where devices are shared, the ranks wake for a call and
            sleep afterwards.
    """

    def __init__(self, ranks: TrainController, settings: GRPOSettings) -> None:
        self._ranks, self._settings = ranks, settings.critic
        self._takes_turns = settings.cluster.takes_turns

    def add_advantages(self, samples: Sequence[dict[str, Any]], groups: Sequence[Group]) -> None:
        """Add ``values``, ``returns`` and whitened ``advantages``, each (T,), to the samples.

        Args:
            samples: Samples of the groups' answers, with ``input_ids`` and ``loss_mask``.
            groups: The answers with their rewards.
        """
        answers = [answer for group in groups for answer in group.answers]
        scores = [answer.reward for answer in answers for _ in answer.samples]
        with awake(self._ranks, takes_turns=self._takes_turns):
            values = self._ranks.forward([{"input_ids": each["input_ids"]} for each in samples])
        masks = [sample["loss_mask"] for sample in samples]
        rewards, _ = token_rewards(scores, masks)
        rows = [row.tolist() for row in values]
        found = self._settings
        advantages, returns = gae(rewards, rows, masks, gamma=found.gamma, lam=found.lam)
        columns = zip(samples, rows, returns, whiten(advantages, masks), strict=True)
        for sample, value, gained, advantage in columns:
            sample |= {"values": value, "returns": gained, "advantages": advantage}

    def train(self, samples: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Run an optimizer step on samples from ``add_advantages``, and return its metrics."""
        samples = [{name: sample[name] for name in _COLUMNS} for sample in samples]
        with awake(self._ranks, takes_turns=self._takes_turns):
            stats = self._ranks.train_batch(samples, "value", {"clip": self._settings.clip})
        kept = ("loss", "grad_norm", "value", "return", "value_clip_fraction")
        return {f"critic/{name}": stats[name] for name in kept if name in stats}

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint; see Part."""
        with awake(self._ranks, takes_turns=self._takes_turns):
            self._ranks.save(str(folder / FOLDER))

    def begin(self, step: int, checkpoint: Path | None) -> None:
        """Read the state of the last checkpoint; see Part.

        Raises:
            CheckpointError: The state cannot be read.
        """
        if checkpoint is not None:
            with awake(self._ranks, takes_turns=self._takes_turns):
                self._ranks.load(str(checkpoint / FOLDER))
