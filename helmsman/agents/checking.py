"""``helmsman chat-check``: whether a chat template only appends turns or rewrites earlier ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.agents._conversation import Conversation
from helmsman.agents._messages import BadRequestError, ChatRequest, Message, ToolCall
from helmsman.agents._template import ChatTemplate
from helmsman.api.errors import BackendNotInstalledError
from helmsman.api.generation import GenerationResult

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
        },
    },
}
_USER = Message(role="user", content="What is a helmsman?")
_NEXT = Message(role="user", content="And a boatswain? Übrigens: 船長 🙂")
_RESULT = Message(role="tool", content='{"found": "a person who steers"}', tool_call_id="call_1")
_CALL = ToolCall("call_1", "look_up", '{"word": "helmsman", "count": 2}')
_OTHER = ToolCall("call_2", "look_up", '{"word": "船長", "count": 1}')


class TemplateFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a chat template on one kind of chat."""

    chat: str
    """The kind of chat."""
    outcome: str
    """``appends``, ``rewrites`` or ``rejected``."""
    reason: str = ""
    """Why a session forks, or the template's own error."""
    is_call_read: bool | None = None
    """Whether tool calls in the template's own form are read back; None without calls."""


class ChatReport(msgspec.Struct, frozen=True, kw_only=True):
    """The findings about a tokenizer and its chat template."""

    family: str
    """Form of the tool calls."""
    stop_tokens: list[str]
    findings: list[TemplateFinding]

    @property
    def appends(self) -> bool:
        """Whether no accepted chat makes a session fork."""
        return all(each.outcome != "rewrites" for each in self.findings)

    @property
    def is_usable(self) -> bool:
        """Whether the template accepts a chat."""
        return any(each.outcome != "rejected" for each in self.findings)

    def text(self) -> str:
        """Return the report for a terminal."""
        lines = [
            f"tool calls: {self.family}    end of a turn: {' '.join(self.stop_tokens)}",
            "",
        ]
        for each in self.findings:
            lines.append(f"  {each.chat:<44} {each.outcome}")
            if each.reason:
                lines.append(f"      {each.reason}")
            if each.is_call_read is False:
                lines.append("      calls in the template's own form are not read; set `family`")
        lines += [
            "",
            "The template rejects every chat; set another one."
            if not self.is_usable
            else "Every chat that is accepted appends: a session is one training sample."
            if self.appends
            else "A chat that is rewritten starts a further branch of its session. Each branch is "
            "a training sample\nof its own; a sampled token is trained on once, in the context in "
            "which it was sampled.",
        ]
        return "\n".join(lines)


def chat_check(tokenizer: Any, family: str | None = None) -> ChatReport:
    """Check how a chat template treats the turns of a model.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        family: Form of the tool calls; recognised from the template when None.

    Returns:
        A finding for each kind of chat.

    Raises:
        ValueError: The tokenizer has no chat template, or the family is unknown.
    """
    template = ChatTemplate(tokenizer, family)
    plain = Message(role="assistant", content="A person who steers a ship.")
    thought = Message(role="assistant", content=plain.content, reasoning="A nautical term.")
    call = Message(role="assistant", tool_calls=(_CALL,))
    calls = Message(role="assistant", tool_calls=(_CALL, _OTHER))
    told = Message(role="assistant", content="I look it up.", tool_calls=(_CALL,))
    thinking_call = Message(role="assistant", reasoning="I should look.", tool_calls=(_CALL,))
    second = Message(role="tool", content="captain", tool_call_id="call_2")
    chats: list[tuple[str, list[Message], bool]] = [
        ("answer, then a question", [_USER, plain, _NEXT], False),
        (
            "system prompt, answer, then a question",
            [Message(role="system", content="Be brief."), _USER, plain, _NEXT],
            False,
        ),
        ("tool call, then its result", [_USER, call, _RESULT], True),
        ("two calls, then their results", [_USER, calls, _RESULT, second], True),
        ("text beside a call, then the result", [_USER, told, _RESULT], True),
        ("call, result, answer, then a question", [_USER, call, _RESULT, plain, _NEXT], True),
        ("reasoning and answer, then a question", [_USER, thought, _NEXT], False),
        ("reasoning and call, then the result", [_USER, thinking_call, _RESULT], True),
    ]
    if not template.format.can_think:
        chats = chats[:-2]
    return ChatReport(
        family=template.format.family,
        stop_tokens=[template.decode([id_]) for id_ in template.stop_ids],
        findings=[
            _examine(template, name, chat, [_TOOL] if has_tools else [])
            for name, chat, has_tools in chats
        ],
    )


def _examine(
    template: ChatTemplate, name: str, chat: Sequence[Message], tools: Sequence[Any]
) -> TemplateFinding:
    """Have the model write its turns as the template would, and send the chat back turn by turn."""
    conversation = Conversation(template)
    is_read: bool | None = None
    try:
        for index, message in enumerate(chat):
            if message.role != "assistant":
                continue
            prompt = conversation.prepare(ChatRequest(messages=chat[:index], tools=tools))
            ids = template.own_turn(chat[:index], message, tools)
            if message.tool_calls and _CALL.name not in template.decode(ids):
                return TemplateFinding(
                    chat=name,
                    outcome="rejected",
                    reason="the template writes no tool calls",
                )
            result = GenerationResult(
                request_id="",
                token_ids=ids,
                logprobs=[0.0] * len(ids),
                versions=[0] * len(ids),
                stop_reason="stop",
            )
            turn, choice = conversation.describe(prompt, result)
            conversation.add(prompt, [turn])
            if message.tool_calls:
                found = [
                    (each.name, json.loads(each.arguments)) for each in choice.message.tool_calls
                ]
                meant = [(each.name, json.loads(each.arguments)) for each in message.tool_calls]
                is_read = (is_read is not False) and found == meant
            chat = [*chat[:index], choice.message, *chat[index + 1 :]]
        prompt = conversation.prepare(ChatRequest(messages=chat, tools=tools))
    except BadRequestError as error:
        return TemplateFinding(chat=name, outcome="rejected", reason=str(error))
    forks = conversation.forks + [prompt.fork] * bool(prompt.fork)
    outcome = "rewrites" if forks else "appends"
    return TemplateFinding(
        chat=name, outcome=outcome, reason=forks[0] if forks else "", is_call_read=is_read
    )


def main(arguments: Sequence[str]) -> int:
    """Run ``helmsman chat-check``.

    Args:
        arguments: The command line after ``chat-check``.

    Returns:
        0 if the template only appends, 1 if it rewrites some chats, 2 if it cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="helmsman chat-check",
        description="Check whether a model's chat template only appends; needs no weights.",
    )
    parser.add_argument("model", help="folder with the model's tokenizer")
    parser.add_argument("--chat-template", help="file with the template, in place of the model's")
    parser.add_argument("--family", help="form of the tool calls")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    given = parser.parse_args(arguments)
    try:
        from helmsman.agents.gateway import load_tokenizer

        tokenizer = load_tokenizer(given.model)
        if given.chat_template is not None:
            tokenizer.chat_template = Path(given.chat_template).read_text()
        report = chat_check(tokenizer, given.family)
    except (ValueError, OSError, BackendNotInstalledError) as error:
        print(f"helmsman chat-check: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(report).decode() if given.json else report.text())
    return 2 if not report.is_usable else 0 if report.appends else 1
