"""What a run leaves in its output folder, so that it can be watched, resumed and compared.

metrics.jsonl       one Record per step, appended as the step ends
checkpoints/        step-000120/, ... and ``latest``, a link to the newest complete one
settings.json       what --resume goes on with
summary.json        written at the end
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from examples.common.settings import Settings

T = TypeVar("T")
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
    """Share of right answers among those that were sampled for training."""
    draws: list[int] = []
    """Numbers of the draws that a GRPO step was trained on; those of the first step begin with
    0.
    """
    held_out_accuracy: float | None = None
    """Share of held-out tasks solved with greedy decoding, on steps that end with an evaluation."""
    tokens: int = 0
    """Tokens that were trained on (sft), or generated for training (grpo)."""
    tokens_per_s: float = 0.0
    """Those tokens over the step's time, without its evaluation."""
    weight_version: int = 0
    """Version of the weights that the step made: the number of optimizer steps, and higher after a
    recovery.
    """
    seconds: float = 0.0
    """Duration of the step, with its evaluation."""

    def with_tokens(self, num_tokens: int, seconds: float) -> Record:
        """Note how many tokens were processed in how many seconds; returns itself."""
        self.tokens, self.tokens_per_s = num_tokens, num_tokens / seconds
        return self


class Summary(msgspec.Struct, kw_only=True):
    """A finished run in numbers."""

    task: str
    accuracy_before: float
    """Share of held-out tasks solved before training."""
    accuracy_after_sft: float
    """The same after the supervised steps."""
    accuracy_after_grpo: float
    """The same at the end."""
    num_held_out: int
    sft_steps: int
    grpo_steps: int
    seconds: float
    """From start to end, workers' start included; resumed runs added up."""
    tokens_per_s: float
    """Generated tokens over the time of all GRPO steps, training included, evaluations not."""
    scheduler: str
    train_workers: int
    rollout_workers: int
    seed: int


def summarize(records: Sequence[Record], settings: Settings, task: str, seconds: float) -> Summary:
    """The summary of a run from its records, which begin with step 0 and end with the last one."""
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
        """All records. A last line that a crash cut short is left out. Raises ValueError when it is
        no such file.
        """
        return read_lines(self._path, Record)

    def rewind(self, step: int) -> list[Record]:
        """Drop the records after ``step``, which a resumed run does again; returns those that
        stay.
        """
        kept = [record for record in self.read() if record.step <= step]
        write_lines(self._path, kept)
        return kept


def clear(out: Path, *, files: Sequence[str] = (), folders: Sequence[str] = ()) -> bool:
    """Remove what an earlier run left in the output folder, and nothing else; returns whether there
    was something.

    Args:
        files, folders: names of what it leaves besides those of this module.

    Raises: FileExistsError when the folder has things of these names, but was not an output folder.
    """
    mark = out / "settings.json"
    all_files = [out / name for name in ("metrics.jsonl", "summary.json", "curve.png", *files)]
    all_folders = [out / name for name in ("checkpoints", "logs", *folders)]
    found = [path.name for path in all_files + all_folders if path.exists()]
    if not mark.exists():
        if found:
            raise FileExistsError(
                f"{out} has {', '.join(found)} but no {mark.name}, so it is not the output of an "
                "earlier run and is left as it "
                "is; give another --out"
            )
        return False
    for path in all_folders:
        shutil.rmtree(path, ignore_errors=True)
    for path in [
        *all_files,
        mark,
    ]:
        # the mark last, so that a clearing that was cut short can be done again
        path.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """Keep every other run out of the output folder for the block, and no longer than this process
    lives.

    Raises: BlockingIOError when there is one.
    """
    with open(out / ".lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another run writes to {out}; end it first, or give another --out"
            ) from error
        yield


def append_line(path: Path, value: Any) -> None:
    """Add a line of JSON by one write, so that a reader never sees half of it."""
    line = msgspec.json.encode(value) + b"\n"
    with open(path, "ab", buffering=0) as file:
        file.write(line)


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """All lines but one that a crash cut short; none where there is no file. Raises ValueError when
    they are something else.
    """
    data = path.read_bytes() if path.exists() else b""
    try:
        return [
            msgspec.json.decode(line, type=kind)
            for line in data[: data.rfind(b"\n") + 1].splitlines()
        ]
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not the record of a run: {error}") from error


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Replace all lines, all or nothing."""
    write_atomically(path, b"".join(msgspec.json.encode(value) + b"\n" for value in values))


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, all or nothing."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content, all or nothing."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(data)
    temporary.replace(path)
