"""Tokenizers for real chat templates, and a model that writes like each family."""

from __future__ import annotations

import functools
import json
import random
import re
import string
import sys
from pathlib import Path
from typing import Any

import pytest

from helmsman.agents._messages import ToolCall

_CORPUS = (
    "the weather in Paris is sunny and the answer is forty two because it adds two numbers. "
    '{"name": "add", "arguments": {"a": 1, "b": 2}} <think> </think> function parameter user '
)
_SPECIAL = re.compile(
    r"<[|｜][^<>|｜{}'\"]*[|｜]>|\[/?[A-Z_]+\]|</?tool_(?:call|response)>|</?s>|</?think>"
    r"|<(?:start|end)_of_turn>"
)


def template_folder() -> Path:
    """Folder with the chat templates of many models, from the package trl; see Makefile."""
    folder = Path(sys.prefix) / "share/chat-templates/trl/chat_templates"
    if not folder.is_dir():
        pytest.skip("needs the chat templates that `make setup` installs")
    return folder


@functools.cache
def tokenizer_of(name: str) -> Any:
    """A small byte-level BPE tokenizer with the chat template of a model family.

    The markers of the template are tokens of their own, as in the family's tokenizer.
    """
    return tokenizer_for((template_folder() / f"{name}.jinja").read_text())


def tokenizer_for(template: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>", "<bos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS, string.printable], trainer)
    special = sorted(set(_SPECIAL.findall(template)))
    tokenizer.add_special_tokens(special)
    ends = [
        each
        for each in (
            "<｜end▁of▁sentence｜>",
            "<|im_end|>",
            "<|eot_id|>",
            "<|return|>",
            "</s>",
            "<|end|>",
        )
        if each in special
    ]
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=ends[0] if ends else "<eos>", bos_token="<bos>"
    )
    made.chat_template = template
    return made


def call_text(family: str, calls: list[ToolCall]) -> str:
    """Write tool calls as a family's models do, with a spacing of their own."""
    found = []
    for call in calls:
        arguments = json.loads(call.arguments)
        tight = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
        if family == "deepseek":
            found.append(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{tight}\n```"
                "<｜tool▁call▁end｜>"
            )
        elif family == "glm":
            pairs = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{json.dumps(value)}</arg_value>\n"
                for key, value in arguments.items()
            )
            found.append(f"<tool_call>{call.name}\n{pairs}</tool_call>")
        elif family == "qwen_xml":
            pairs = "".join(
                f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            found.append(f"<tool_call>\n<function={call.name}>\n{pairs}</function>\n</tool_call>")
        elif family == "gptoss":
            return (
                f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
                f"<|message|>{tight}"
            )
        elif family == "pythonic":
            named = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            found.append(f"<|tool_call_start|>[{call.name}({named})]<|tool_call_end|>")
        elif family == "mistral":
            found.append(f'[TOOL_CALLS][{{"name":"{call.name}","arguments":{tight}}}]')
        elif family == "llama":
            return f'{{"name":"{call.name}","parameters":{tight}}}'
        else:
            found.append(f'<tool_call>{{"name":"{call.name}","arguments":{tight}}}</tool_call>')
    text = "".join(found)
    return f"<｜tool▁calls▁begin｜>{text}<｜tool▁calls▁end｜>" if family == "deepseek" else text


def loosely(tokenizer: Any, text: str, draw: random.Random) -> list[int]:
    """Encode a text in pieces, as a model may sample it, unlike the tokenizer would."""
    ids: list[int] = []
    position = 0
    while position < len(text):
        special = _SPECIAL.match(text, position)
        size = len(special[0]) if special else draw.choice([1, 1, 2, 3, 8, 20])
        later = _SPECIAL.search(text, position + 1)
        if not special and later:
            size = min(size, later.start() - position)
        ids += tokenizer.encode(text[position : position + size], add_special_tokens=False)
        position += size
    return ids
