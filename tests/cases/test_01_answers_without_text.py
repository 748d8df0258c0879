"""Rows whose answer has no plain text: it is trained on as meant, or the row is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases.inputs import ANSWER, USER, call, load, texts

NAN = float("nan")


def says(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("recipe", "row", "field"),
    [
        (
            "SFT",
            {"messages": [USER, says(None, tool_calls=call("{}"))]},
            "'messages'[1].tool_calls",
        ),
        ("SFT", {"messages": [USER, says("a", tool_calls=call({}))]}, "'messages'[1].tool_calls"),
        ("SFT", {"messages": [USER, says(None)]}, "'messages'[1].content is null"),
        ("SFT", {"messages": [USER, {"role": "assistant"}]}, "'messages'[1].content is null"),
        ("SFT", {"messages": [USER, says(NAN)]}, "'messages'[1].content is null"),
        ("SFT", {"messages": [USER, says([])]}, "'messages'[1].content is null"),
        ("SFT", {"messages": [USER, says(7)]}, "'messages'[1].content is not of a chat"),
        ("SFT", {"messages": [USER, says({"a": 1})]}, "'messages'[1].content is not of a chat"),
        ("SFT", {"messages": [USER, says([{"type": "image"}])]}, "'messages'[1].content[0].type"),
        ("SFT", {"messages": [USER, {**USER, "content": "bye"}]}, "'messages' has no turn"),
        ("SFT", {"messages": [ANSWER]}, "'messages' is refused by the chat template"),
        ("SFT", {"text": None}, "the row has no values"),
        ("SFT", {"text": NAN, "source": "web"}, "the row has 'source'"),
        ("SFT", {"text": ["a"]}, "'text' is ['a']"),
        ("SFT", {"prompt": "1", "answer": NAN}, "the row has 'prompt'"),
        ("SFT", {"prompt": "1"}, "the row has 'prompt'"),
        ("SFT", {"prompt": "1", "answer": ["a", "b"]}, "'answer' is ['a', 'b']"),
        ("SFT", {"prompt": None, "answer": "1"}, "the row has 'answer'"),
        ("SFT", {"prompt": [USER], "completion": [USER]}, "'completion' is [{'role': 'user'"),
        ("DPO", {"prompt": "hi", "chosen": [says(None)], "rejected": "no"}, "'chosen'[0].content"),
        ("DPO", {"prompt": "hi", "chosen": "yes", "rejected": NAN}, "'rejected' is null"),
        ("DPO", {"prompt": "hi", "chosen": "yes", "rejected": ""}, "'rejected' is ''"),
        ("DPO", {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "'prompt' is null"),
        ("DPO", {"chosen": "the same", "rejected": "the same"}, "'prompt' is null"),
    ],
)
def test_refused(recipe: str, row: dict[str, Any], field: str, folder: Path) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        load(recipe, [row], folder)
    assert str(caught.value).startswith(f"unusable row (data, row 1): {field}")


@pytest.mark.parametrize(
    ("recipe", "row", "trained"),
    [
        ("SFT", {"messages": [USER, says([{"type": "text", "text": "yes"}])]}, ["yes<eos>\n"]),
        ("SFT", {"messages": [USER, ANSWER, {**USER, "content": "bye"}]}, ["yo<eos>\n"]),
        ("SFT", {"messages": [USER, says("None")]}, ["None<eos>\n"]),
        ("SFT", {"prompt": [USER], "completion": ANSWER}, ["yo<eos>\n"]),
        ("SFT", {"prompt": USER, "completion": [USER, ANSWER]}, ["yo<eos>\n"]),
        ("SFT", {"prompt": "1", "answer": 2.5}, ["2.5<eos>\n"]),
        (
            "DPO",
            {"prompt": "hi", "chosen": says("yes"), "rejected": "no"},
            ["yes<eos>\n", "no<eos>\n"],
        ),
    ],
)
def test_trained_on(recipe: str, row: dict[str, Any], trained: list[str], folder: Path) -> None:
    (found,) = load(recipe, [row], folder)
    assert texts(found, folder) == trained


def test_skipped_rows_are_counted(folder: Path) -> None:
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, says(None)]}, {"text": None}]
    assert len(load("SFT", {"train": rows, "on_bad_row": "skip"}, folder)) == 1
