"""Test malformed and hostile texts of models, and the places of their parts in the tokens."""
# ruff: noqa: RUF001 - DeepSeek's markers

from __future__ import annotations

import json
from typing import Any

import pytest

from helmsman.agents._conversation import Conversation, Turn
from helmsman.agents._formats import FORMATS, ModelFormat, Parsed
from helmsman.agents._messages import ChatRequest, Digest, Message, ToolCall
from helmsman.agents._template import ChatTemplate
from helmsman.api.generation import GenerationResult
from tests.agents.chat_models import call_text, tokenizer_of

FAMILIES = [each.name for each in FORMATS]
ADD = {"a": {"type": "integer"}, "b": {"type": "integer"}}
USER, NEXT = Message(role="user", content="hello"), Message(role="user", content="and now?")


def parse(family: str, text: str, properties: Any = ADD, *, template: str = "") -> Parsed:
    schema = {"type": "object", "properties": properties}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name in ("add", "f")
    ]
    return ModelFormat(template, family).parse(text, "", tools, has_tools=True)


def written(family: str, arguments: str) -> str:
    """Write a call with any text for its arguments, or for the value of its argument."""
    text = call_text(family, [ToolCall("", "f", '{"x": "@"}')])
    return text.replace('{"x":"@"}', arguments).replace('"@"', arguments)


def sampled(template: ChatTemplate, text: str) -> GenerationResult:
    ids = template.encode(text)
    num = len(ids)
    return GenerationResult(
        request_id="", token_ids=ids, logprobs=[0.0] * num, versions=[0] * num, stop_reason="stop"
    )


def take_turn(template: ChatTemplate, text: str, **request: Any) -> tuple[Conversation, Turn]:
    """Add a turn in which the model answers ``USER`` by a text."""
    conversation = Conversation(template)
    prompt = conversation.prepare(ChatRequest(messages=[USER], **request))
    turn, _ = conversation.describe(prompt, sampled(template, text))
    conversation.add(prompt, [turn])
    return conversation, turn


# --- malformed calls ------------------------------------------------------------------------------

NO_CALLS = ["5", "null", '"x"', '["f"]', "[[1]]", '{"name": ""}']
NOT_PLAIN = ['{"x": NaN}', '{"x": -Infinity}', '{"x": "\\ud83d"}', '{"\\udc00": 1}']
NO_LITERALS = ['b"a"', "{1, 2}", "...", "1j", "{(1, 2): 3}", "1e999", r'"\ud83d"', f"0x{9**9999:x}"]
MALFORMED = [
    *(("hermes", f"<tool_call>{each}</tool_call>") for each in NO_CALLS),
    *(("mistral", f"[TOOL_CALLS][{each}]") for each in NO_CALLS),
    *(("mistral", f"[TOOL_CALLS]f[ARGS]{each}") for each in NOT_PLAIN),
    *((family, written(family, each)) for family in ("hermes", "llama", "deepseek", "mistral")
      for each in NOT_PLAIN),
    *(("pythonic", f"<|tool_call_start|>[f(x={each})]<|tool_call_end|>") for each in NO_LITERALS),
    ("pythonic", f"<|tool_call_start|>{'-' * 50_000}1<|tool_call_end|>"),
    ("glm", "<tool_call>f\n<arg_key>x</arg_key><arg_value>NaN</arg_value></tool_call>"),
    ("qwen_xml", written("qwen_xml", '"\\ud83d"')),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_parse_malformed_calls(family: str, text: str) -> None:
    found = parse(family, f"{text}\n", {})
    assert (found.content, found.tool_calls) == (text, ())


@pytest.mark.parametrize("arguments", ["5", "[1]", *NOT_PLAIN])
def test_parse_malformed_calls_of_harmony(arguments: str) -> None:
    found = parse("gptoss", written("gptoss", arguments))
    assert (found.content, found.tool_calls) == (arguments, ())


@pytest.mark.parametrize("properties", [[], "x", 5, None])
@pytest.mark.parametrize("family", ["glm", "qwen_xml"])
def test_parse_schema_of_any_json(family: str, properties: Any) -> None:
    arguments = {"a": 1, "b": 2}
    text = call_text(family, [ToolCall("", "add", json.dumps(arguments))])
    (call,) = parse(family, text, properties).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", arguments)


def test_parse_calls_of_llama_between_semicolons() -> None:
    text = '{"name":"f","parameters":{"x":"cd /; ls"}}; {"name":"add","parameters":{}}'
    calls = [(each.name, json.loads(each.arguments)) for each in parse("llama", text).tool_calls]
    assert calls == [("f", {"x": "cd /; ls"}), ("add", {})]


def test_parse_nested_arguments() -> None:
    def later(call: ToolCall, num_frames: int) -> None:
        if num_frames:
            return later(call, num_frames - 1)
        Digest([], {}).add(Message(role="assistant", tool_calls=(call,)))
        return None

    num_read = 0
    for depth in range(1, 1000):
        text = written("hermes", f'{{"x":{"[" * depth}{"]" * depth}}}')
        for call in parse("hermes", text).tool_calls:
            later(call, 20)
            num_read += 1
    assert 100 < num_read < 999


def test_digest_lone_surrogates() -> None:
    def digest(text: str) -> bytes:
        call = ToolCall("", "f", json.dumps({"x": text}))
        return Digest([text], {}).add(Message(role="assistant", content=text, tool_calls=(call,)))

    assert digest("\ud83d") == digest("\ud83d")
    assert len({digest(each) for each in ("\ud83d", "\ud83e", "?", "\\ud83d", "🙂")}) == 5
    message = Message(role="user", content="hello \ud83d")
    prompt = Conversation(ChatTemplate(tokenizer_of("qwen2_5"))).prepare(
        ChatRequest(messages=[message])
    )
    assert prompt.ids()


# --- hostile texts --------------------------------------------------------------------------------

HOSTILE = [
    ("", "<tool_call>"),
    ("", "<tool_call>\n"),
    ("", "<tool_call>f"),
    ("<tool_call>f", "<arg_key>"),
    ("<tool_call>f", "<arg_key>a</arg_key>"),
    ("<tool_call>f", "<arg_key>a</arg_key><arg_value>"),
    ("<tool_call>f<arg_key>a</arg_key>", " "),
    ("", "<tool_call><function="),
    ("", "<tool_call><function=f>"),
    ("<tool_call><function=f>", "</function>"),
    ("<tool_call><function=f>", "</function> </tool_call"),
    ("<tool_call><function=f></function>", " "),
    ("<tool_call><function=f>", "<parameter="),
    ("<tool_call><function=f>", "<parameter=a>"),
    ("<tool_call><function=f>", "<parameter=a>\n\n"),
    ("", "<|channel|>"),
    ("<|channel|>", "a"),
    ("<|channel|>a", " "),
    ("<|channel|>a", " to=a"),
    ("", " to=a"),
    ("", "<|start|>assistant to=a<|channel|>a<|constrain|>a"),
    ("", "<|start|>assistant<|channel|>final<|message|>"),
    ("", "<|channel|>a to=functions.f<|message|>"),
    ("", "[TOOL_CALLS]"),
    ("[TOOL_CALLS]", "a"),
    ("[TOOL_CALLS]", " "),
    ("[TOOL_CALLS]", "a{}"),
    ("[TOOL_CALLS]", "[ARGS]"),
    ("", "<｜tool▁calls▁begin｜>"),
    ("", "<｜tool▁call▁begin｜>"),
    ("", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
    ("", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "\n```"),
    ("<｜tool▁call▁begin｜>", "f"),
    ("", "<|tool_call_start|>"),
    ("", "<|tool_call_start|>f("),
    ("<|tool_call_start|>", "-"),
    ("<|tool_call_start|>", "f(),"),
    ("{", "}"),
    ("{", "} "),
    ("{", "};"),
    ("{};", " "),
    ('{"a":', "["),
    ("", "<think>"),
    ("<think>", " "),
    ("<think>", "</think> "),
    ("", " "),
]
CLOSINGS = (
    "x",
    "</tool_call>",
    "</arg_value></tool_call>",
    "</function></tool_call>",
    "</parameter></function></tool_call>",
    "<|message|>{}",
    "<｜tool▁call▁end｜>",
    "<|tool_call_end|>",
    "}",
    "</think>",
)


@pytest.mark.timeout(30)  # a text that takes quadratic time takes minutes
@pytest.mark.parametrize("family", FAMILIES)
def test_parse_hostile_texts_in_linear_time(family: str) -> None:
    for start, unit in HOSTILE:
        text = start + unit * (100_000 // len(unit))
        for closing in CLOSINGS:
            found = parse(family, text + closing, template="<think></think>")
            assert found.body <= len(text + closing)


# --- places in the tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2_5", "gptoss"])
@pytest.mark.parametrize(
    "text", ["ok 🙂 more text", "日本語のテキスト", "naïve 🙂🙃", "a\ufffdb 🙂"]
)
def test_split_characters_of_several_tokens(name: str, text: str) -> None:
    template = ChatTemplate(tokenizer_of(name))
    ids = template.encode(text)
    for at in range(len(text) + 1):
        num = template.split(ids, at)
        assert template.decode(ids[:num]) == text[: max(at, len(template.decode(ids[:num])))]
        assert num == 0 or not template.decode(ids[: num - 1]).startswith(text[:at])
    assert template.split(ids, len(text) + 1) == len(ids)


def test_split_characters_of_byte_tokens() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    made.chat_template = "{% for each in messages %}{{ each.content }}<eos>{% endfor %}"
    template = ChatTemplate(made)
    text = "🙂🙃 ok 🙂"
    ids = list(text.encode())
    for at in range(len(text) + 1):
        assert template.split(ids, at) == len(text[:at].encode())


def test_describe_reasoning_before_several_tokens() -> None:
    template = ChatTemplate(tokenizer_of("gptoss"))
    _, turn = take_turn(
        template,
        "<|channel|>analysis<|message|>hmm 🙂<|end|>"
        "<|start|>assistant<|channel|>final<|message|>yes<|return|>",
    )
    assert template.decode(turn.result.ids[slice(*turn.reasoning)]) == "hmm 🙂"
    assert template.decode(turn.result.ids[slice(*turn.body)]) == "yes"


# --- harmony --------------------------------------------------------------------------------------

ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>The answer is 42.<|return|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":  1}<|call|>'


@pytest.mark.parametrize("text", [FINAL, ANALYSIS + FINAL])
def test_prepare_rewritten_answers_of_harmony(text: str) -> None:
    template = ChatTemplate(tokenizer_of("gptoss"))
    conversation, turn = take_turn(template, text)
    assert turn.message.content == "The answer is 42."
    chat = [USER, Message(role="assistant", content=turn.message.content), NEXT]
    prompt = conversation.prepare(ChatRequest(messages=chat))
    assert prompt.fork
    assert template.decode(prompt.ids()) == template.render(chat)


@pytest.mark.parametrize("text", [CALL, ANALYSIS + CALL])
def test_prepare_rewritten_calls_of_harmony(text: str) -> None:
    template = ChatTemplate(tokenizer_of("gptoss"))
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    conversation, turn = take_turn(template, text, tools=tools)
    result = Message(role="tool", content="7", tool_call_id=turn.message.tool_calls[0].id)
    chat = [USER, turn.message, result]
    prompt = conversation.prepare(ChatRequest(messages=chat, tools=tools))
    assert prompt.parent is turn
    conversation.add(
        prompt, [conversation.describe(prompt, sampled(template, ANALYSIS + FINAL))[0]]
    )
    chat += [Message(role="assistant", content="The answer is 42."), NEXT]
    prompt = conversation.prepare(ChatRequest(messages=chat, tools=tools))
    assert prompt.fork
    assert template.decode(prompt.ids()) == template.render(chat, tools)


def test_prepare_text_beside_a_call_of_harmony() -> None:
    template = ChatTemplate(tokenizer_of("gptoss"))
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    prefix = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    conversation, turn = take_turn(template, ANALYSIS + prefix + CALL, tools=tools)
    assert (turn.message.reasoning, turn.message.content) == ("Let me see.", "I look.")
    result = Message(role="tool", content="7", tool_call_id=turn.message.tool_calls[0].id)
    prompt = conversation.prepare(ChatRequest(messages=[USER, turn.message, result], tools=tools))
    assert prompt.fork == "the template drops the reasoning of an earlier answer"
    for text in ("I look.", '{"x": 1}', "7"):
        assert text in template.decode(prompt.ids())
