"""Test supervised fine-tuning as a recipe, and the rows that it and DPO take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes import SFT
from helmsman.recipes.prompts import preferences, supervised
from helmsman.recipes.rows import RowError
from helmsman.recipes.settings import Data
from helmsman.recipes.tokens import ChatTokenizer
from tests.recipes.runs import lines

CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
WRONG = [CHAT[0], {"role": "assistant", "content": "33"}]


@pytest.fixture
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer(str(model), Data(train=""))


@pytest.mark.parametrize(
    ("entry", "text", "num_trained"),
    [
        ({"prompt": "1+1=", "answer": 2}, "<user>1+1=\n<assistant>2\n", 3),
        ({"prompt": "1+1=", "completion": "2"}, "<user>1+1=\n<assistant>2\n", 3),
        ({"messages": CHAT}, "<user>1+1=\n<assistant>2\n", 3),
        (CHAT, "<user>1+1=\n<assistant>2\n", 3),
        ({"text": "1+1=2"}, "1+1=2", 6),
        ("1+1=2", "1+1=2", 6),
        ({"input_ids": [4, 5, 6], "loss_mask": [0, 0, 1]}, "123", 1),
    ],
)
def test_supervised_rows(tokenizer: ChatTokenizer, entry: Any, text: str, num_trained: int) -> None:
    row = supervised(entry, Data(train=""), tokenizer)
    assert row.prompt == text
    assert sum(row.samples[0]["loss_mask"]) == num_trained


def test_supervised_row_without_answer(tokenizer: ChatTokenizer) -> None:
    message = (
        "the row has 'prompt', 'level', expected 'input_ids', 'messages', 'prompt' with 'answer'"
    )
    with pytest.raises(RowError, match=message):
        supervised({"prompt": "1+1=", "level": 3}, Data(train=""), tokenizer)


@pytest.mark.parametrize(
    "entry",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "33"},
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": WRONG[1:]},
        {"chosen": CHAT, "rejected": WRONG},
    ],
)
def test_preference_rows(tokenizer: ChatTokenizer, entry: dict[str, Any]) -> None:
    row = preferences(entry, Data(train=""), tokenizer)
    texts = [tokenizer.decode(sample["input_ids"]) for sample in row.samples]
    assert texts == ["<user>1+1=\n<assistant>2\n", "<user>1+1=\n<assistant>33\n"]
    with pytest.raises(RowError, match="'rejected' is null, expected a prompt with"):
        preferences({"prompt": "x", "chosen": "y"}, Data(train=""), tokenizer)


def test_sft_learns_and_resumes(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+0=", "answer": number} for number in range(10)]

    def run(steps: int, **settings: Any) -> SFT:
        data = {"train": rows, "num_held_out": 2}
        return SFT(
            model,
            data,
            steps=steps,
            batch_size=4,
            evaluate_every=3,
            train={"lr": 1e-2},
            cluster={"scheduler": "inline"},
            out=str(tmp_path / "out"),
            **settings,
        )

    summary = run(6).train()
    assert summary.loss_first is not None
    assert summary.loss_last is not None
    assert summary.loss_last < summary.loss_first - 1
    found = lines(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in found if "eval/loss" in row] == [0, 3, 6]
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    run(8, resume=True).train()
    assert [row["step"] for row in lines(tmp_path / "out" / "metrics.jsonl")] == list(range(9))
