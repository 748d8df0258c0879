"""Task and reward of the documentation's snippets, which reward workers import without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Task:
    prompt_ids: list[int]


def check(task: Task, answer: Any) -> float:
    return float(len(answer.token_ids) % 2)
