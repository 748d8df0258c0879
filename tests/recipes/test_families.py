"""Chats of each model family: the assistant's turns are trained on, and nothing else."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes.prompts import preferences, supervised
from helmsman.recipes.rows import RowError
from helmsman.recipes.settings import Data
from helmsman.recipes.tokens import ChatTokenizer
from tests.agents.chat_models import template_folder, tokenizer_for
from tests.recipes.families import FAMILIES

CHAT = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "the end"},
]
CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}
WITHOUT_END = ("glm4moe", "without end", "diffusion_gemma", "gemma4", "idefics", "smolvlm")
"""Begin the names of templates that end no turn, or by a text that is no token here."""


def names() -> list[str]:
    try:
        return [*FAMILIES, *sorted(path.stem for path in template_folder().glob("*.jinja"))]
    except pytest.skip.Exception:
        return list(FAMILIES)


@functools.cache
def tokenizer_of(name: str, folder: Path) -> ChatTokenizer:
    template = FAMILIES.get(name) or (template_folder() / f"{name}.jinja").read_text()
    tokenizer_for(template).save_pretrained(folder / name)
    return ChatTokenizer(str(folder / name), Data(train=""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def trained(samples: list[dict[str, Any]], tokenizer: ChatTokenizer) -> list[str]:
    return [
        tokenizer.tokenizer.decode(
            [i for i, counts in zip(each["input_ids"], each["loss_mask"], strict=True) if counts]
        )
        for each in samples
    ]


@pytest.mark.parametrize("name", names())
def test_trains_on_turns_of_assistant(name: str, folder: Path) -> None:
    tokenizer = tokenizer_of(name, folder)
    data = Data(train="")
    samples = supervised({"messages": CHAT}, data, tokenizer).samples
    text = "".join(trained(samples, tokenizer))
    assert text.count("answer") == text.count("the end") == 1
    assert not {"question", "more"} & set(text.split())
    assert tokenizer.end_id is not None or name.startswith(WITHOUT_END)
    if tokenizer.end_id is not None:
        assert tokenizer.end_id in tokenizer.stop_ids
        ids = [i for each in samples for i in each["input_ids"][each["loss_mask"].index(1) :]]
        assert tokenizer.end_id in ids
    pair = {"prompt": CHAT[:3], "chosen": CHAT[3:], "rejected": "no"}
    for each, word in zip(
        preferences(pair, data, tokenizer).samples, ("the end", "no"), strict=True
    ):
        (answer,) = trained([each], tokenizer)
        assert word in answer
        assert "more" not in answer


@pytest.mark.parametrize("name", names())
def test_trains_on_calls_or_refuses_them(name: str, folder: Path) -> None:
    tokenizer = tokenizer_of(name, folder)
    messages = [
        CHAT[0],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "result", "name": "look", "tool_call_id": "call00000"},
        CHAT[3],
    ]
    try:
        samples = supervised(
            {"messages": messages, "tools": [TOOL]}, Data(train=""), tokenizer
        ).samples
    except RowError as error:
        reason = str(error)
        assert "left out by the chat template" in reason or "is refused by" in reason
        return
    text = "".join(trained(samples, tokenizer))
    assert "look" in text
    assert "None" not in text
    assert "result" not in text
    assert all("look" in tokenizer.decode(each["input_ids"]) for each in samples)
