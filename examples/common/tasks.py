"""Tasks with verifiers: from reasoning-gym, or from a JSONL file of prompts and answers.

Both come as a TaskSet whose held-out tasks are never trained on.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from examples.common.settings import Settings


class Task(msgspec.Struct, frozen=True):
    """A prompt, and the data of its verifier."""

    prompt: str
    answer: str | None
    """A right answer for supervised training, or None if the source has none."""
    entry: Any = None
    """The source's own record."""


class TaskSet(msgspec.Struct, frozen=True):
    """Tasks to train on, tasks to evaluate on, and their verifier."""

    name: str
    train: list[Task]
    held_out: list[Task]
    score: Callable[[Task, str], float]
    """Reward of an answer, 0 to 1; 1 is right."""

    @property
    def solved(self) -> list[Task]:
        """Return the training tasks that have an answer."""
        return [task for task in self.train if task.answer is not None]


def load_tasks(settings: Settings) -> TaskSet:
    """Load the tasks that the settings name; raises the errors of the functions below."""
    if settings.data is not None:
        return jsonl_tasks(settings.data, num_held_out=settings.num_held_out, seed=settings.seed)
    return reasoning_gym_tasks(
        settings.task,
        settings.task_params,
        num_tasks=settings.num_tasks,
        num_held_out=settings.num_held_out,
        seed=settings.seed,
    )


class _Line(msgspec.Struct, frozen=True):
    prompt: str
    answer: str


def reasoning_gym_tasks(
    name: str, params: Mapping[str, Any], *, num_tasks: int, num_held_out: int, seed: int
) -> TaskSet:
    """Generate tasks of a reasoning-gym dataset; rewards are those of its own verifier.

    Args:
        name: Dataset, such as ``palindrome_generation``.
        params: Its parameters, such as ``{"min_length": 5}``.
        num_tasks: Number of tasks to generate; equal ones count once.
        num_held_out: Number of them to evaluate on.
        seed: Seed of generation and split.

    Raises:
        ValueError: There is no such dataset, or it does not take these parameters or give enough
            tasks.
    """
    import reasoning_gym

    if taken := params.keys() & {"seed", "size"}:
        raise ValueError(
            f"the task parameters have {', '.join(sorted(taken))}; these come from --seed and "
            "--num-tasks"
        )
    try:
        # Spread seeds: the dataset draws task i from seed + i, so neighbouring seeds would share
        # nearly all their tasks.
        dataset = reasoning_gym.create_dataset(
            name, seed=seed * 1_000_003 + 1, size=num_tasks, **params
        )
    except (ValueError, TypeError, AssertionError) as exc:
        known = (
            ""
            if name in reasoning_gym.factory.DATASETS
            else f"; known: {', '.join(sorted(reasoning_gym.factory.DATASETS))}"
        )
        raise ValueError(
            f"reasoning-gym cannot make the task {name!r} with {dict(params)}: {exc}{known}"
        ) from exc
    entries = [dataset[index] for index in range(num_tasks)]
    answers = [None if entry["answer"] is None else str(entry["answer"]) for entry in entries]
    tasks = [
        Task(entry["question"], answer, entry)
        for entry, answer in zip(entries, answers, strict=True)
    ]
    train, held_out = split(tasks, num_held_out, seed)

    def score(task: Task, text: str) -> float:
        return float(dataset.score_answer(text, task.entry))

    return TaskSet(name, train, held_out, score)


def jsonl_tasks(path: str | Path, *, num_held_out: int, seed: int) -> TaskSet:
    """Read tasks from a file with one ``{"prompt": ..., "answer": ...}`` per line; an answer is
    right if it is the same text.

    Args:
        path: The file; blank lines are skipped.
        num_held_out: Number of tasks to evaluate on.
        seed: Seed of the split.

    Raises:
        ValueError: A line is not of this form (the message has its number), or there are too few
            tasks.
        OSError: The file cannot be read.
    """
    tasks = []
    for number, line in enumerate(
        Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1
    ):
        if line.strip():
            try:
                pair = msgspec.json.decode(line, type=_Line)
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                raise ValueError(
                    f'{path}, line {number}: {exc}; expected {{"prompt": "...", "answer": "..."}}'
                ) from exc
            tasks.append(Task(pair.prompt, pair.answer))
    train, held_out = split(tasks, num_held_out, seed)
    return TaskSet(Path(path).stem, train, held_out, exact_match)


def exact_match(task: Task, text: str) -> float:
    """Return 1 if the text is the answer, up to blanks around it, else 0."""
    return float(task.answer is not None and text.strip() == task.answer.strip())


def split(tasks: Sequence[Task], num_held_out: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Return tasks to train on and tasks to hold out, drawn by ``seed``.

    No held-out prompt is trained on, not even with its characters in another order: a held-out
    "3 + 14" excludes "14 + 3" from training, and one shuffle of letters excludes all of them.

    Raises:
        ValueError: There are too few different tasks for both kinds.
    """
    unique = list({task.prompt: task for task in tasks}.values())
    random.Random(f"{seed}/split").shuffle(unique)
    held_out = unique[:num_held_out]
    reserved = {_signature(task) for task in held_out}
    train = [task for task in unique[num_held_out:] if _signature(task) not in reserved]
    if len(held_out) < num_held_out or not train:
        raise ValueError(
            f"{len(unique)} different tasks do not give {num_held_out} to hold out and others to "
            f"train on ({len(train)} are "
            "left); give more tasks, harder ones, or hold out fewer"
        )
    return train, held_out


def _signature(task: Task) -> str:
    return "".join(sorted(task.prompt))
