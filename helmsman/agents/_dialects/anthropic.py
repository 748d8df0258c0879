"""The Messages API of Anthropic: its requests, answers, streams and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from helmsman.agents._dialects.base import Dialect, convert, event, functions, parses_tools, text_of
from helmsman.agents._messages import (
    BadRequestError,
    ChatRequest,
    ChatResponse,
    Message,
    ToolCall,
    json_object,
)


class _AnthropicMessage(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _AnthropicBody(msgspec.Struct):
    messages: list[_AnthropicMessage]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class AnthropicMessages(Dialect):
    """The Messages API of Anthropic: its requests, answers, streams and errors."""

    path: ClassVar[str] = "messages"
    ping = event({"type": "ping"})

    def read(self, body: dict[str, Any]) -> ChatRequest:
        found = convert(body, _AnthropicBody)
        messages = [Message(role="system", content=text_of(found.system, "system"))] * bool(
            found.system
        )
        for index, each in enumerate(found.messages):
            messages += _messages(each, f"messages[{index}]")
        return ChatRequest(
            messages=messages,
            tools=functions(found.tools, "custom", schema="input_schema"),
            parse_tools=parses_tools(found.tool_choice),
            max_tokens=found.max_tokens,
            stop=tuple(found.stop_sequences or ()),
            stream=bool(found.stream),
        )

    def write(self, answer: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
        choice = answer.choices[0]
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(choice.finish, "end_turn")
        if choice.stop_text is not None and choice.finish == "stop":
            reason = "stop_sequence"
        return {
            **_head(answer),
            "content": _blocks(choice.message),
            "stop_reason": reason,
            "stop_sequence": choice.stop_text,
            "usage": _usage(answer),
        }

    def events(self, answer: ChatResponse, body: Mapping[str, Any]) -> Iterator[str]:
        whole = self.write(answer, body)
        start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
        yield event({"type": "message_start", "message": start})
        for index, block in enumerate(whole["content"]):
            empty, deltas = _deltas(block)
            kinds = {"type": "content_block_start", "index": index, "content_block": empty}
            yield event(kinds)
            for delta in deltas:
                yield event({"type": "content_block_delta", "index": index, "delta": delta})
            yield event({"type": "content_block_stop", "index": index})
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield event({"type": "message_delta", "delta": ended, "usage": whole["usage"]})
        yield event({"type": "message_stop"})

    def error(self, status: int, message: str, *, field: str, code: str) -> dict[str, Any]:
        kind = {
            401: "authentication_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
        }.get(status, "invalid_request_error" if status < 500 else "api_error")
        text = f"{field}: {message}" if field else message
        return {"type": "error", "error": {"type": kind, "message": text}}


def _messages(found: _AnthropicMessage, field: str) -> Iterator[Message]:
    """Split a message into the results of tools, which come first, and the rest."""
    if found.role not in ("user", "assistant"):
        raise BadRequestError(f"role is {found.role!r}; expected user or assistant", field)
    if isinstance(found.content, str):
        yield Message(role=found.role, content=found.content)  # type: ignore[arg-type]
        return
    rest: list[Any] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(found.content):
        kind = block.get("type")
        if kind == "tool_result" and found.role == "user":
            text = text_of(block.get("content"), f"{field}.content[{index}]")
            if block.get("is_error"):
                text = f"Error: {text}"
            yield Message(role="tool", content=text, tool_call_id=str(block.get("tool_use_id")))
        elif kind == "tool_use" and found.role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(ToolCall(str(block.get("id")), str(block.get("name")), arguments))
        elif kind == "thinking" and found.role == "assistant":
            thoughts.append(str(block.get("thinking")))
        elif kind != "redacted_thinking":
            rest.append(block)
    if rest or calls or thoughts:
        yield Message(
            role=found.role,  # type: ignore[arg-type]
            content=text_of(rest, f"{field}.content"),
            reasoning="\n".join(thoughts),
            tool_calls=tuple(calls),
        )


def _head(answer: ChatResponse) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
    }


def _usage(answer: ChatResponse) -> dict[str, int]:
    num_new = sum(len(each.token_ids) for each in answer.choices)
    return {"input_tokens": len(answer.prompt_ids), "output_tokens": num_new}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not (message.tool_calls or message.reasoning):
        blocks.append({"type": "text", "text": message.content})
    blocks += [
        {"type": "tool_use", "id": each.id, "name": each.name, "input": json_object(each.arguments)}
        for each in message.tool_calls
    ]
    return blocks


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a content block without its content, and the deltas that fill it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": ""},
        ]
    text = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
