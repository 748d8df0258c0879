"""Rows as NumPy, pandas and arrow give them work as rows of lists and numbers do."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.cases.inputs import ANSWER, USER, load

NAN = float("nan")


def array(*items: Any) -> Any:
    made = numpy.empty(len(items), dtype=object)
    made[:] = items
    return made


@pytest.mark.parametrize(
    ("recipe", "row", "same"),
    [
        (
            "GRPO",
            {
                "prompt": array(USER),
                "reward_model": {"ground_truth": "2", "style": "rule"},
                "extra_info": {"index": numpy.int64(0), "split": numpy.str_("train")},
            },
            {
                "prompt": [USER],
                "reward_model": {"ground_truth": "2", "style": "rule"},
                "extra_info": {"index": 0, "split": "train"},
            },
        ),
        ("GRPO", {"prompt": numpy.array([5, 6, 7])}, {"prompt": [5, 6, 7]}),
        ("GRPO", {"prompt": numpy.array([5, 6], dtype=numpy.uint16)}, {"prompt": [5, 6]}),
        ("GRPO", {"prompt": (USER,)}, {"prompt": [USER]}),
        (
            "GRPO",
            {"prompt": numpy.str_("hi"), "answer": numpy.float32(2)},
            {"prompt": "hi", "answer": 2.0},
        ),
        ("SFT", {"messages": array(USER, ANSWER)}, {"messages": [USER, ANSWER]}),
        (
            "SFT",
            {"messages": array(USER, {**ANSWER, "tool_calls": None, "name": NAN})},
            {"messages": [USER, ANSWER]},
        ),
        (
            "SFT",
            {"messages": array(USER, {**ANSWER, "content": array({"type": "text", "text": "yo"})})},
            {"messages": [USER, ANSWER]},
        ),
        (
            "SFT",
            {"input_ids": numpy.array([5, 6]), "loss_mask": numpy.array([False, True])},
            {"input_ids": [5, 6], "loss_mask": [0, 1]},
        ),
        ("SFT", {"messages": None, "text": "abc", "prompt": NAN}, {"text": "abc"}),
        (
            "SFT",
            {"prompt": "1", "answer": NAN, "completion": "2"},
            {"prompt": "1", "completion": "2"},
        ),
        ("SFT", {"prompt": "1", "answer": numpy.int32(2)}, {"prompt": "1", "answer": 2}),
        (
            "DPO",
            {"prompt": array(USER), "chosen": array(ANSWER), "rejected": numpy.str_("no")},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": "no"},
        ),
    ],
)
def test_rows_of_arrays(
    recipe: str, row: dict[str, Any], same: dict[str, Any], folder: Path
) -> None:
    (found,), (expected,) = load(recipe, [row], folder), load(recipe, [same], folder)
    assert (found.prompt_ids, found.samples) == (expected.prompt_ids, expected.samples)
    assert found.answer == expected.answer
    assert same.items() <= found.entry.items() or recipe == "SFT"


def test_frame_made_for_verl(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "prompt": [array(USER), array(USER)],
            "reward_model": [{"ground_truth": "2"}, {"ground_truth": "3"}],
            "when": pandas.to_datetime(["2026-01-31", None]),
            "level": pandas.array([1, None], dtype="Int64"),
        }
    )
    rows = load("GRPO", frame, folder)
    assert [row.answer for row in rows] == ["2", "3"]
    assert [row.entry["when"] for row in rows] == [datetime.datetime(2026, 1, 31), None]
    assert [row.entry["level"] for row in rows] == [1, None]


def test_tensors(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    (row,) = load(
        "SFT", [{"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([-100, 6])}], folder
    )
    assert row.samples == [{"input_ids": [5, 6], "loss_mask": [0, 1]}]
