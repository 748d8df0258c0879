"""Test sample tables: rows in a file, and lines for the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helmsman.agents.samples import Sample
from helmsman.recipes.batches import Answer, Group
from helmsman.recipes.prompts import Draw, Row
from helmsman.recipes.samples import FILE, log_samples
from helmsman.recipes.scorer import Scored
from tests.recipes.runs import lines
from tests.unit.recipes.data import settings


class Letters:
    """A tokenizer whose token ids are characters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


SAMPLE = Sample(
    input_ids=[ord("?"), ord("2")],
    loss_mask=[0, 1],
    logprobs=[0.0, -0.5],
    versions=[-1, 0],
    turn_ends=[2],
    turn_rewards=[0.0],
    reward=0.5,
    session_id="",
    is_truncated=False,
)
GROUP = Group(
    Draw(0, Row([1], "1+1=\n" * 20, "2", "sums", {}), [7]),
    [Answer([SAMPLE], Scored({"exact": 0.5}, 0.5), 0.5)] * 2,
)


def log(out: Path, step: int, samples: str, *more: tuple[str, str]) -> str:
    keys = {"tracking.samples": samples, "tracking.show_samples_every": "3", "out": str(out)}
    tokenizer: Any = Letters()
    return log_samples(step, [GROUP] * 3, settings(*keys.items(), *more), tokenizer)


def test_log_samples_rows_and_tables(tmp_path: Path) -> None:
    shown = [log(tmp_path, step, "2") for step in range(1, 5)]
    assert [bool(text) for text in shown] == [True, False, True, False]
    assert shown[0].splitlines()[1].split() == [*["1+1="] * 8, "1...", "2", "0.500"]
    assert [each["step"] for each in lines(tmp_path / FILE)] == [1, 1, 2, 2, 3, 3, 4, 4]
    log(tmp_path, 5, "1", ("rewards", "[]"), ("agent.use", "my.agent:run"))
    assert lines(tmp_path / FILE)[-1]["prompt"] == "?", "an agent writes its own prompts"


def test_log_samples_off(tmp_path: Path) -> None:
    assert log(tmp_path, 1, "0") == ""
    assert not (tmp_path / FILE).exists()
