"""Chats whose parts a template leaves out because of other messages, keys or columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agents.chat_models import template_folder
from tests.cases.inputs import ANSWER, TOOL, USER, call, load, texts, tokenizer_folder

EOT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ONCE = EOT.replace("{{ m.content }}", "{{ '' if loop.index0 == 2 and loop.last else m.content }}")
CALLS = EOT.replace(
    "<eot>",
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.arguments | tojson }}{% endfor %}<eot>",
)


def looks(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": call('{"a": 1}'), **more}


def test_content_left_out_in_a_later_round(tmp_path: Path) -> None:
    """DeepSeek's template renders the text beside calls once, so a kind of message says little."""
    template = (template_folder() / "deepseekv3.jinja").read_text()
    folder = tokenizer_folder(tmp_path, template, bos_token="<bos>")
    result = {"role": "tool", "content": "1"}
    chat = [USER, looks("one"), result, ANSWER, USER, looks("two"), result]
    with pytest.raises(ValueError, match=r"'prompt'\[5\].content is left out by the chat template"):
        load("GRPO", [{"prompt": chat[:3]}, {"prompt": chat}], folder)
    unweighted = [*chat[:5], {**chat[5], "weight": 0}, result, ANSWER]
    with pytest.raises(ValueError, match=r"'messages'\[5\].content is left out by the chat templ"):
        load("SFT", [{"messages": unweighted}], folder)


def test_content_left_out_by_its_place(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, ONCE)
    with pytest.raises(ValueError, match=r"row 2\): 'prompt'\[2\].content is left out"):
        load("GRPO", [{"prompt": [USER]}, {"prompt": [USER, ANSWER, USER]}], folder)


BEGUN = "<user>hi<eot><assistant>"


@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        ("GRPO", {"prompt": BEGUN, "system": "be"}),
        ("SFT", {"prompt": BEGUN, "answer": "yo", "system": "be"}),
        ("SFT", {"prompt": BEGUN, "completion": [ANSWER]}),
        ("SFT", {"prompt": [{"role": "user", "content": BEGUN}], "completion": "yo"}),
        ("DPO", {"prompt": BEGUN, "chosen": "a", "rejected": "b", "system": "be"}),
        ("DPO", {"prompt": BEGUN, "chosen": [ANSWER], "rejected": "no"}),
    ],
)
def test_no_template_around_a_rendered_prompt(
    recipe: str, row: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"row 1\): the end of 'prompt' is '<user>hi<eot><assis"):
        load(recipe, [row], tokenizer_folder(tmp_path, EOT))


def test_rendered_prompt_with_its_columns(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, EOT)
    row = {"prompt": f"<system>be. look<eot>{BEGUN}", "system": "be", "tools": [TOOL]}
    assert load("GRPO", [row], folder)[0].prompt == row["prompt"]
    (found,) = load("SFT", [{**row, "answer": "yo"}], folder)
    assert texts(found, folder) == ["yo<eot>"]


@pytest.mark.parametrize(
    ("recipe", "row", "template"),
    [
        ("GRPO", {"prompt": BEGUN}, EOT),
        ("GRPO", {"prompt": [4, 5]}, EOT),
        ("GRPO", {"prompt": "hi"}, None),
        ("SFT", {"prompt": BEGUN, "answer": "yo"}, EOT),
        ("SFT", {"prompt": [4, 5], "answer": "yo"}, EOT),
        ("SFT", {"prompt": "hi", "answer": "yo"}, None),
        ("DPO", {"prompt": "hi", "chosen": "a", "rejected": "b"}, None),
        ("DPO", {"chosen": "Human: a", "rejected": "Human: b"}, EOT),
    ],
)
def test_tools_beside_texts(
    recipe: str, row: dict[str, Any], template: str | None, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"'tools' is 'look', expected a chat, or a prompt that"):
        load(recipe, [{**row, "tools": [TOOL]}], tokenizer_folder(tmp_path, template))


def test_parts_for_users_only(tmp_path: Path) -> None:
    users = EOT.replace("{{ m.content }}", "{% for c in m.content %}{{ c.text }}{% endfor %}")
    template = EOT.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'user' %}<user>{% for c in m.content %}{{ c.text }}"
        "{% endfor %}<eot>{% else %}",
    ).replace("<eot>{% endfor %}{% if add", "<eot>{% endif %}{% endfor %}{% if add")
    for name, each in (("all", users), ("users", template)):
        folder = tokenizer_folder(tmp_path / name, each)
        (row,) = load("SFT", [{"messages": [USER, ANSWER]}], folder)
        assert texts(row, folder, trained=False) == ["<user>hi<eot><assistant>yo<eot>"]


@pytest.mark.parametrize("arguments", [[["a", "1"]], ["a"], 7, True])
def test_arguments_that_are_no_mapping(arguments: Any, tmp_path: Path) -> None:
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": call(arguments)}]
    with pytest.raises(ValueError, match=r"tool_calls\[0\].function.arguments is not of a chat"):
        load("SFT", [{"messages": chat}], tokenizer_folder(tmp_path, CALLS))


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "who", "answer": "x", "context": "facts"}, "'context' is 'facts', expected a"),
        (
            {"messages": [{**USER, "value": "bye"}, ANSWER]},
            "'messages'[0].value is 'bye', expected",
        ),
        ({"messages": [{**USER, "from": "gpt"}, ANSWER]}, "'messages'[0].from is 'gpt', expected"),
        ({"input_ids": [4, 5, 6], "cu_seqlens": [0, 1, 3]}, "'cu_seqlens' is [0, 1, 3], expected"),
    ],
)
def test_refused(row: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        load("SFT", [row], tokenizer_folder(tmp_path, EOT))
    assert str(caught.value).startswith(f"unusable row (data, row 1): {field}")


def test_columns_that_say_the_same(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, EOT)
    rows = [
        {"messages": [{**USER, "from": "user", "value": "hi"}, ANSWER]},
        {"prompt": "facts: who", "answer": "yo", "context": "facts"},
        {"input_ids": [4, 5, 6], "cu_seqlens": [0, 3], "position_ids": [0, 1, 2]},
    ]
    assert len(load("SFT", rows, folder)) == 3
    (row,) = load("SFT", [{"messages": [USER, ANSWER], "system_message": "be"}], folder)
    assert texts(row, folder, trained=False) == ["<system>be<eot><user>hi<eot><assistant>yo<eot>"]


@pytest.mark.parametrize("reasoning", ["+ - =", "(", "?"])
def test_reasoning_of_signs_is_not_cut(reasoning: str, tmp_path: Path) -> None:
    cut = EOT.replace("m.content }}", "m.content.split('</think>')[-1] }}")
    chat = [USER, {"role": "assistant", "content": f"{reasoning}\n</think>\nyo"}]
    with pytest.raises(ValueError, match=r"a part of 'messages'\[1\] is left out"):
        load("SFT", [{"messages": chat}], tokenizer_folder(tmp_path, cut))
