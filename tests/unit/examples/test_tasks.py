"""Test that held-out tasks are never trained on, and that invalid tasks are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.common.settings import TASK_PARAMS
from examples.common.tasks import (
    Task,
    TaskSet,
    exact_match,
    jsonl_tasks,
    reasoning_gym_tasks,
    split,
)

PALINDROMES = TASK_PARAMS["palindrome_generation"]


def palindromes(seed: int = 0, num_tasks: int = 600) -> TaskSet:
    return reasoning_gym_tasks(
        "palindrome_generation", PALINDROMES, num_tasks=num_tasks, num_held_out=50, seed=seed
    )


def test_reasoning_gym_tasks_held_out_apart() -> None:
    tasks = palindromes(num_tasks=2000)

    assert len(tasks.held_out) == 50
    held_out = {"".join(sorted(task.entry["metadata"]["letters"])) for task in tasks.held_out}
    trained = {"".join(sorted(task.entry["metadata"]["letters"])) for task in tasks.train}
    assert len(trained) > 1300
    assert not held_out & trained


def test_reasoning_gym_tasks_seed() -> None:
    def prompts(seed: int) -> tuple[list[str], list[str]]:
        tasks = palindromes(seed)
        return [task.prompt for task in tasks.train], [task.prompt for task in tasks.held_out]

    assert prompts(3) == prompts(3)
    assert not set(prompts(3)[0]) & set(prompts(4)[0])


def test_task_set_score() -> None:
    tasks = palindromes()
    task = tasks.train[0]
    assert task.answer is not None
    half = len(task.answer) // 2
    start, middle = task.answer[:half], task.answer[half : len(task.answer) - half]

    assert tasks.score(task, task.answer) == 1.0
    assert tasks.score(task, start[::-1] + middle + start) == 1.0
    assert tasks.score(task, task.answer + "x") < 0.1
    assert tasks.score(task, "") == 0.0


def test_reasoning_gym_tasks_unknown() -> None:
    with pytest.raises(
        ValueError, match=r"cannot make the task 'palindromes'.*palindrome_generation"
    ):
        reasoning_gym_tasks("palindromes", {}, num_tasks=10, num_held_out=2, seed=0)


def test_reasoning_gym_tasks_unknown_parameter() -> None:
    with pytest.raises(ValueError, match="cannot make the task 'chain_sum' with .*length"):
        reasoning_gym_tasks("chain_sum", {"length": 5}, num_tasks=10, num_held_out=2, seed=0)


def test_split_other_orders_of_characters() -> None:
    tasks = [Task(f"{a} + {b}", str(a + b)) for a in range(10) for b in range(10)]

    train, held_out = split(tasks, 20, seed=0)

    reserved = {"".join(sorted(task.prompt)) for task in held_out}
    assert not reserved & {"".join(sorted(task.prompt)) for task in train}
    assert 60 <= len(train) <= 80


def test_split_too_few_tasks() -> None:
    with pytest.raises(ValueError, match="1 different tasks do not give 1 to hold out"):
        split([Task("a", "b")] * 50, 1, seed=0)


def test_jsonl_tasks_split_and_score(tmp_path: Path) -> None:
    path = tmp_path / "capitals.jsonl"
    lines = [
        json.dumps({"prompt": f"number {i}?", "answer": f" {i}\n", "more": 1}) for i in range(20)
    ]
    path.write_text("\n".join(lines) + "\n\n")

    tasks = jsonl_tasks(path, num_held_out=5, seed=1)

    assert tasks.name == "capitals"
    assert len(tasks.held_out) == 5
    assert not {task.prompt for task in tasks.train} & {task.prompt for task in tasks.held_out}
    assert [tasks.score(Task("number 7?", " 7\n"), text) for text in ("7", " 7 ", "8", "7.")] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    assert tasks.held_out == jsonl_tasks(path, num_held_out=5, seed=1).held_out
    assert tasks.held_out != jsonl_tasks(path, num_held_out=5, seed=2).held_out


@pytest.mark.parametrize("line", ['{"prompt": "x"}', "{", '{"prompt": 1, "answer": "x"}', "[]"])
def test_jsonl_tasks_malformed_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "x", "answer": "y"}\n' + line + "\n")

    with pytest.raises(ValueError, match=r"tasks\.jsonl, line 2: "):
        jsonl_tasks(path, num_held_out=1, seed=0)


def test_exact_match_without_answer() -> None:
    assert exact_match(Task("x", None), "") == 0.0
