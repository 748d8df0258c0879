"""The functions of a row are given to the chat template, or the row is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.cases.inputs import ANSWER, TOOL, USER, load, texts, tokenizer_folder

WITH_TOOLS = (
    "{% for t in tools or [] %}TOOL {{ t.function.name }}\n{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS: dict[str, dict[str, Any]] = {
    "SFT": {"messages": [USER, ANSWER]},
    "DPO": {"prompt": [USER], "chosen": "a", "rejected": "b"},
    "GRPO": {"prompt": [USER], "answer": "1"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("case"), WITH_TOOLS)


def whole(recipe: str, row: dict[str, Any], folder: Path) -> list[str]:
    (found,) = load(recipe, [row], folder)
    return texts(found, folder, trained=False) or [found.prompt]


@pytest.mark.parametrize("recipe", ROWS)
@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        json.dumps([TOOL]),
        (TOOL,),
        numpy.array([TOOL], dtype=object),
        [{**TOOL, "strict": None}],
    ],
    ids=["list", "JSON", "tuple", "array", "null"],
)
def test_tools_are_rendered(recipe: str, tools: Any, folder: Path) -> None:
    found = whole(recipe, {**ROWS[recipe], "tools": tools}, folder)
    assert all(text.startswith("TOOL look\n<user>hi") for text in found)


@pytest.mark.parametrize("recipe", ROWS)
@pytest.mark.parametrize("tools", [None, [], "[]", "null", float("nan")])
def test_no_tools(recipe: str, tools: Any, folder: Path) -> None:
    assert whole(recipe, {**ROWS[recipe], "tools": tools}, folder) == whole(
        recipe, ROWS[recipe], folder
    )


@pytest.mark.parametrize("recipe", ROWS)
@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("[{", "'tools' is '[{', expected JSON"),
        ("look", "'tools' is 'look', expected JSON"),
        (["look"], "'tools' is ['look'], expected a list of functions"),
        (TOOL, "'tools' is {'type'"),
        (7, "'tools' is 7, expected a list of functions"),
    ],
)
def test_other_tools(recipe: str, tools: Any, message: str, folder: Path) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        whole(recipe, {**ROWS[recipe], "tools": tools}, folder)
    assert str(caught.value).startswith(f"unusable row (data, row 1): {message}")


@pytest.mark.parametrize("recipe", ROWS)
@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_template_without_place_for_tools(
    recipe: str, template: str | None, tmp_path: Path
) -> None:
    folder = tokenizer_folder(tmp_path, template)
    with pytest.raises(ValueError, match=r"row 1\): 'tools' is left out by the chat template"):
        load(recipe, [{**ROWS[recipe], "tools": [TOOL]}], folder)


@pytest.mark.parametrize("recipe", ROWS)
def test_variables_of_a_row(recipe: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, "{{ mood }}" + WITH_TOOLS)
    row = {**ROWS[recipe], "chat_template_kwargs": {"mood": "!"}}
    assert all(text.startswith("!<user>hi") for text in whole(recipe, row, folder))
    row = {**ROWS[recipe], "chat_template_kwargs": "mood"}
    with pytest.raises(ValueError, match="'chat_template_kwargs' is 'mood', expected variables"):
        whole(recipe, row, folder)
