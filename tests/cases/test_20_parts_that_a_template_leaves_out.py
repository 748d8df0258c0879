"""All parts of a row reach the model, or the row is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases.inputs import ANSWER, TOOL, USER, call, load, texts, tokenizer_folder

CUE = "{% if add_generation_prompt %}<assistant>{% endif %}"
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}CALL {{ c.function.arguments | tojson }}{% endfor %}"
PLAIN = EACH + "<eot>{% endfor %}" + CUE
CUT = EACH.replace("m.content", "m.content.split('</think>')[-1]") + "<eot>{% endfor %}" + CUE
EMPTY = CUT.replace(
    "<{{ m.role }}>", "<{{ m.role }}>{{ '<think></think>' if m.role == 'assistant' }}"
)
FIRST = EACH + CALLS.replace("or []", "and m.tool_calls[:1] or []") + "<eot>{% endfor %}" + CUE
INSTEAD = EACH.replace(
    "{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}" + CALLS
)
INSTEAD += "<eot>{% endfor %}" + CUE
NO_TOOL = PLAIN.replace("messages %}", "messages if m.role not in ('tool', 'system') %}")
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<eot>{% endgeneration %}"
    "{% else %}{{ m.content }}<eot>{% endif %}{% endfor %}" + CUE
)
THOUGHT = {"role": "assistant", "content": "<think>42</think>It is 42."}
KEYED = {"role": "assistant", "content": "It is 42.", "reasoning_content": "42"}


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("template", "messages", "field"),
    [
        (CUT, [USER, THOUGHT], "a part of 'messages'[1]"),
        (EMPTY, [USER, THOUGHT], "a part of 'messages'[1]"),
        (PLAIN, [USER, KEYED], "a part of 'messages'[1]"),
        (PLAIN, [USER, {**ANSWER, "thinking": "hm"}], "a part of 'messages'[1]"),
        (
            NO_TOOL,
            [USER, ANSWER, {"role": "tool", "content": "42"}, said("It is 42.")],
            "'messages'[2].content",
        ),
        (NO_TOOL, [{"role": "system", "content": "user"}, USER, ANSWER], "'messages'[0].content"),
        (FIRST, [USER, said("", tool_calls=call({}) * 2)], "'messages'[1].tool_calls[1]"),
        (
            INSTEAD,
            [USER, said("Let me", tool_calls=call({})), USER, said("Let me")],
            "'messages'[1].content",
        ),
    ],
)
def test_part_left_out(
    template: str, messages: list[dict[str, Any]], field: str, tmp_path: Path
) -> None:
    folder = tokenizer_folder(tmp_path, template)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        load("SFT", [{"messages": messages}], folder)
    assert f"row 1): {field} is left out by the chat template" in str(caught.value)


@pytest.mark.parametrize("recipe", ["SFT", "DPO", "GRPO"])
def test_system_prompt_of_the_settings(recipe: str, tmp_path: Path) -> None:
    row = {"prompt": "hi", "answer": "1"}
    row = {"prompt": "hi", "chosen": "a", "rejected": "b"} if recipe == "DPO" else row
    data = {"train": [row], "system_prompt": "Be"}
    with pytest.raises(ValueError, match=r"row 1\): data.system_prompt is left out by the chat"):
        load(recipe, data, tokenizer_folder(tmp_path, NO_TOOL))


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, FIRST)
    one, two = ({"messages": [USER, said("", tool_calls=call({}) * n)]} for n in (1, 2))
    with pytest.raises(ValueError, match=r"row 2\): 'messages'\[1\].tool_calls\[1\] is left out"):
        load("SFT", [one, two], folder)


def test_turns_of_their_own_before_marks(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, MARKED)
    (row,) = load("SFT", [{"messages": [USER, THOUGHT, USER, ANSWER]}], folder)
    assert texts(row, folder) == ["<think>42</think>It is 42.<eot>", "yo<eot>"]


def test_different_answers_of_equal_tokens(tmp_path: Path) -> None:
    row = {"prompt": "hi", "chosen": "a<eot>", "rejected": "a"}
    with pytest.raises(ValueError, match="'chosen' and 'rejected' differ, but have equal tokens"):
        load("DPO", [row], tokenizer_folder(tmp_path, PLAIN))


@pytest.mark.parametrize(
    ("chosen", "rejected"), [("yo", "yo"), ([ANSWER], "yo"), ({**ANSWER}, ANSWER)]
)
def test_equal_answers(chosen: Any, rejected: Any, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, PLAIN)
    (row,) = load("DPO", [{"prompt": "hi", "chosen": chosen, "rejected": rejected}], folder)
    assert texts(row, folder) == ["yo<eot>", "yo<eot>"]


TOOL_USE = "{% if tools %}TOOL{% endif %}" + EACH + CALLS + "<eot>{% endfor %}" + CUE
WITH_TOOLS = TOOL_USE.replace("m.tool_calls or []", "tools and m.tool_calls or []")
TEXT = WITH_TOOLS.replace(" | tojson", "")


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize(
    "template",
    [
        WITH_TOOLS,
        TEXT,
        [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOL_USE}],
    ],
    ids=["condition", "text", "named"],
)
def test_arguments_of_templates_that_need_tools(
    template: Any, arguments: Any, tmp_path: Path
) -> None:
    named = isinstance(template, list)
    more = {"chat_template": template} if named else {}
    folder = tokenizer_folder(tmp_path, None if named else template, **more)
    row = {"messages": [USER, said("", tool_calls=call(arguments))], "tools": [TOOL]}
    (found,) = load("SFT", [row], folder)
    assert texts(found, folder) == ['CALL {"a": 1}<eot>']
