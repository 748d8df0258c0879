"""A chat that the template rejects is an error that names the row, in every recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases.inputs import ANSWER, USER, call, load, texts, tokenizer_folder

STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
    "{% endfor %}"
)
JOINED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ ' ' + c['function']['arguments'] }}{% endfor %}{% endfor %}"
)
GOOD: dict[str, dict[str, Any]] = {
    "SFT": {"prompt": "a", "answer": "b"},
    "DPO": {"prompt": [USER], "chosen": "a", "rejected": "b"},
    "GRPO": {"prompt": [USER]},
}


@pytest.mark.parametrize(
    ("recipe", "row", "reason"),
    [
        ("SFT", {"messages": [USER, USER, ANSWER]}, "'messages' is refused .*roles must alternate"),
        ("SFT", {"prompt": {"content": "x"}, "answer": "b"}, r"'prompt'\[0\] is not of a chat"),
        ("SFT", {"prompt": float("nan"), "answer": "b"}, "the row has 'answer'"),
        ("SFT", {"input_ids": [5, 6], "loss_mask": [1]}, "'loss_mask' is .1., expected 2 numbers"),
        ("SFT", {"input_ids": [5, 6], "loss_mask": [0, 2]}, "'loss_mask' is .0, 2."),
        ("SFT", {"input_ids": [5, 6], "labels": [-100]}, "'labels' is .-100., expected the token"),
        ("SFT", {"input_ids": [5, 6], "labels": "5 6"}, "'labels' is '5 6', expected the token"),
        ("SFT", {"input_ids": [[5, 6]]}, "'input_ids' is ..5, 6.., expected token ids"),
        ("SFT", {"input_ids": [5, 6], "loss_mask": [1, 0]}, "the row has no token to train on"),
        ("DPO", {"prompt": [USER, USER], "chosen": "a", "rejected": "b"}, "roles must alternate"),
        ("DPO", {"prompt": [USER], "chosen": "a", "rejected": 1 + 1j}, r"'rejected' is \(1\+1j\)"),
        ("GRPO", {"prompt": [USER, USER]}, "'prompt' is refused .*roles must alternate"),
        ("GRPO", {"prompt": "\ud800"}, "a text is .*, expected valid Unicode"),
        ("GRPO", {"answer": "1"}, "the row has 'answer', expected 'prompt'"),
    ],
)
def test_error_names_row_and_field(
    recipe: str, row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = tokenizer_folder(tmp_path, STRICT)
    with pytest.raises(ValueError, match=rf"unusable row \(data, row 2\): .*{reason}"):
        load(recipe, [GOOD[recipe], row], folder)
    data = {"train": [GOOD[recipe], row], "on_bad_row": "skip"}
    assert len(load(recipe, data, folder)) == 1


@pytest.mark.parametrize(("template", "text"), [(ITEMS, "a=1"), (JOINED, ' {"a": 1}')])
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_arguments_as_the_template_takes_them(
    template: str, text: str, arguments: Any, tmp_path: Path
) -> None:
    folder = tokenizer_folder(tmp_path, template)
    calls = {"role": "assistant", "content": None, "tool_calls": call(arguments)}
    (row,) = load("SFT", [{"messages": [USER, calls]}], folder)
    assert texts(row, folder)[0].endswith(text)


def test_arguments_that_are_not_json(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, ITEMS)
    calls = {"role": "assistant", "content": None, "tool_calls": call("{a: 1")}
    with pytest.raises(ValueError, match=r"row 1\): 'messages' is refused .*JSONDecodeError"):
        load("SFT", [{"messages": [USER, calls]}], folder)


def test_error_names_file_and_line(tmp_path: Path) -> None:
    folder, path = tokenizer_folder(tmp_path / "model", STRICT), tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(GOOD['SFT'])}\n\n{{\n")
    with pytest.raises(ValueError, match=r"\(.*rows.jsonl, line 3\): the line is not JSON"):
        load("SFT", path, folder)


def test_template_that_changes_what_precedes(tmp_path: Path) -> None:
    counted = (
        "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    folder = tokenizer_folder(tmp_path, counted)
    with pytest.raises(ValueError, match=r"'messages'\[1\] changes how the chat template renders"):
        load("SFT", [{"messages": [USER, ANSWER]}], folder)
