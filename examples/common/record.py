"""Files of a run in its output folder, by which it is watched, resumed and compared.

metrics.jsonl       one Record per step, appended as the step ends
checkpoints/        step-000120/, ... and ``latest``, a link to the newest complete one
settings.json       settings that --resume continues with
summary.json        written at the end
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from examples.common.settings import Settings
from helmsman.recipes.curve import draw_curve
from helmsman.recipes.files import append_line, read_lines, write_lines

Phase = Literal["eval", "sft", "grpo"]


class Record(msgspec.Struct, kw_only=True):
    """One step of a run, filled in as the step goes on."""

    step: int
    """0 is the evaluation before training; then supervised steps, then GRPO steps."""
    phase: Phase
    loss: float | None = None
    """Mean over the batch's tokens."""
    reward: float | None = None
    """Mean reward of the sampled answers."""
    accuracy: float | None = None
    """Share of right answers among the answers sampled for training."""
    draws: list[int] = []
    """Numbers of the draws that a GRPO step was trained on, from 0 in the first step."""
    held_out_accuracy: float | None = None
    """Share of held-out tasks solved with greedy decoding, on steps that end with an evaluation."""
    tokens: int = 0
    """Tokens trained on (sft) or generated for training (grpo)."""
    tokens_per_s: float = 0.0
    """These tokens over the step's time, without its evaluation."""
    weight_version: int = 0
    """Version of the weights after the step: the number of optimizer steps, higher after a
    recovery.
    """
    seconds: float = 0.0
    """Duration of the step, with its evaluation."""

    def with_tokens(self, num_tokens: int, seconds: float) -> Record:
        """Set the tokens and their rate over these seconds; returns itself."""
        self.tokens, self.tokens_per_s = num_tokens, num_tokens / seconds
        return self


class Summary(msgspec.Struct, kw_only=True):
    """A finished run in numbers."""

    task: str
    accuracy_before: float
    """Share of held-out tasks solved before training."""
    accuracy_after_sft: float
    """Share solved after the supervised steps."""
    accuracy_after_grpo: float
    """Share solved at the end."""
    num_held_out: int
    sft_steps: int
    grpo_steps: int
    seconds: float
    """Duration including the start of workers, summed over resumed runs."""
    tokens_per_s: float
    """Generated tokens over the time of all GRPO steps, training included, evaluations not."""
    scheduler: str
    train_workers: int
    rollout_workers: int
    seed: int


def summarize(records: Sequence[Record], settings: Settings, task: str, seconds: float) -> Summary:
    """Summarize a run from its records, from step 0 to the last one."""
    accuracies = {
        record.step: record.held_out_accuracy
        for record in records
        if record.held_out_accuracy is not None
    }
    grpo = [record for record in records if record.phase == "grpo" and record.tokens_per_s > 0]
    grpo_s = sum(record.tokens / record.tokens_per_s for record in grpo)
    return Summary(
        task=task,
        accuracy_before=accuracies[0],
        accuracy_after_sft=accuracies[settings.sft_steps],
        accuracy_after_grpo=accuracies[max(accuracies)],
        num_held_out=settings.num_held_out,
        sft_steps=settings.sft_steps,
        grpo_steps=settings.steps,
        seconds=round(seconds, 1),
        tokens_per_s=round(sum(record.tokens for record in grpo) / grpo_s, 1) if grpo_s else 0.0,
        scheduler=settings.scheduler,
        train_workers=settings.train_workers,
        rollout_workers=settings.rollout_workers,
        seed=settings.seed,
    )


class MetricsLog:
    """metrics.jsonl: an append-only list of records with one line per step, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, record: Record) -> None:
        """Add a step's record."""
        append_line(self._path, record)

    def read(self) -> list[Record]:
        """Return all records, without a last line that a crash cut short.

        Raises ValueError for another file."""
        return read_lines(self._path, Record)

    def rewind(self, step: int) -> list[Record]:
        """Drop the records after ``step``, which a resumed run repeats; returns the others."""
        kept = [record for record in self.read() if record.step <= step]
        write_lines(self._path, kept)
        return kept


def draw(records: Sequence[Record], path: Path, summary: Summary) -> None:
    """Draw the learning curve of a run, from step 0 to the last one."""
    draw_curve(
        path,
        sampled=[(record.step, record.reward) for record in records if record.reward is not None],
        accuracies=[
            (record.step, record.held_out_accuracy)
            for record in records
            if record.held_out_accuracy is not None
        ],
        title=f"{summary.task}: {summary.accuracy_after_sft:.0%} to "
        f"{summary.accuracy_after_grpo:.0%} by GRPO",
        subtitle=f"{summary.num_held_out} held-out tasks, {summary.train_workers} train and "
        f"{summary.rollout_workers} rollout "
        f"workers on {summary.scheduler}, {summary.tokens_per_s:,.0f} tokens/s, "
        f"{summary.seconds:.0f} s, seed {summary.seed}",
        supervised_until=summary.sft_steps,
        last_step=records[-1].step,
    )
