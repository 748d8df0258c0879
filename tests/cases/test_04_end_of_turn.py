"""The trained answer ends as the chat template ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes.settings import Data
from helmsman.recipes.tokens import ChatTokenizer
from tests.cases.inputs import ANSWER, USER, load, texts, tokenizer_folder

EOT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eot>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LAST = EOT.replace("<eot>\n", "{{ '<eos>' if loop.last and m.role == 'assistant' else '<eot>' }}\n")
BOS = "{{ bos_token }}" + EOT
OPEN = EOT.replace("<eot>", "")
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% generation %}"
    "{{ m.content }}<eot>{% endgeneration %}\n{% else %}<{{ m.role }}>{{ m.content }}<eot>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PREFILLED = EOT.replace("{% if add", "{% set think = '' %}{% if add").replace(
    "<assistant>{% endif", "<assistant>#{% endif"
)
CHAT = [USER, ANSWER, {"role": "user", "content": "more"}, {"role": "assistant", "content": "end"}]


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (EOT, ["yo<eot>\nend<eot>\n"]),
        (BOS, ["yo<eot>\nend<eot>\n"]),
        (MARKED, ["yo<eot>end<eot>"]),
        (LAST, ["yo<eos>\n", "end<eos>\n"]),
        (OPEN, ["yo\nend\n"]),
        (PREFILLED, ["yo<eot>\nend<eot>\n"]),
        (None, ["yo<eos>end<eos>"]),
    ],
    ids=["eot", "bos", "marked", "last", "open", "prefilled", "none"],
)
def test_turns_of_a_chat(template: str | None, trained: list[str], tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, template, bos_token="<bos>")
    (row,) = load("SFT", [{"messages": CHAT}], folder)
    assert texts(row, folder) == trained
    assert all(
        text.count("<bos>") == (template == BOS) for text in texts(row, folder, trained=False)
    )


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, ["a<eot>\n", "b<eot>\n"]),
        ({"prompt": "hi", "chosen": "a<eot>", "rejected": "b<eot>\n"}, ["a<eot>\n", "b<eot>\n"]),
        ({"chosen": [USER, ANSWER], "rejected": CHAT}, None),
    ],
)
def test_pairs(row: dict[str, Any], trained: list[str] | None, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, EOT)
    if trained is None:
        with pytest.raises(ValueError, match="'prompt' is null, expected a prompt, or the same"):
            load("DPO", [row], folder)
        return
    (found,) = load("DPO", [row], folder)
    assert texts(found, folder) == trained


def test_pair_of_message_and_number(tmp_path: Path) -> None:
    row = {"prompt": [USER], "chosen": ANSWER, "rejected": 7}
    (found,) = load("DPO", [row], tokenizer_folder(tmp_path, EOT))
    assert texts(found, tmp_path) == ["yo<eot>\n", "7<eot>\n"]


def test_pair_with_an_empty_answer(tmp_path: Path) -> None:
    row = {"prompt": [USER], "chosen": ANSWER, "rejected": {**ANSWER, "content": ""}}
    folder = tokenizer_folder(tmp_path, OPEN.replace("\n", ""))
    with pytest.raises(ValueError, match=r"row 1\): the row has no token to train on"):
        load("DPO", [row], folder)


def test_pair_whose_turns_change(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, LAST)
    row = {"prompt": [USER], "chosen": CHAT[1:], "rejected": "b"}
    with pytest.raises(ValueError, match="'chosen' or 'rejected' has turns that the chat template"):
        load("DPO", [row], folder)


@pytest.mark.parametrize(
    ("row", "whole"),
    [
        ({"text": "a"}, "<bos>a<eos>"),
        ({"text": "<bos>a<eos>"}, "<bos>a<eos>"),
        ({"text": "<bos><user>hi<eot>\n<assistant>yo<eot>\n"}, None),
        ({"prompt": "<user>hi<eot>\n<assistant>", "answer": "yo"}, None),
        ({"prompt": "<bos><user>hi<eot>\n<assistant>", "answer": "yo<eot>\n"}, None),
    ],
)
def test_special_tokens_are_not_doubled(
    row: dict[str, Any], whole: str | None, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    folder = tokenizer_folder(tmp_path, BOS, bos_token="<bos>")
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [(token, fast.token_to_id(token)) for token in ("<bos>", "<eos>")]
    fast.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=ids)
    fast.save(str(folder / "tokenizer.json"))
    (found,) = load("SFT", [row], folder)
    (text,) = texts(found, folder, trained=False)
    assert text.count("<bos>") == 1
    assert text.count("<eos>") == 1
    if whole is not None:
        assert text == whole


@pytest.mark.parametrize(
    ("template", "end"), [(EOT, "<eot>"), (OPEN, None), (None, "<eos>"), (LAST, "<eos>")]
)
def test_stop_tokens_of_generation(template: str | None, end: str | None, tmp_path: Path) -> None:
    made = ChatTokenizer(str(tokenizer_folder(tmp_path, template)), Data(train=""))
    ids = made.tokenizer.convert_tokens_to_ids(["<eos>", *([end] if end else [])])
    assert (made.end_id, set(made.stop_ids)) == (ids[1] if end else None, set(ids))
