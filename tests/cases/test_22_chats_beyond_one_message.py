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
