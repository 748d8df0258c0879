"""The Responses API of OpenAI: its requests, answers, streams and errors."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from helmsman.agents._dialects.base import (
    Dialect,
    convert,
    event,
    functions,
    parses_tools,
    refuse,
    refuse_schema,
    text_of,
)
from helmsman.agents._messages import (
    BadRequestError,
    ChatRequest,
    ChatResponse,
    Choice,
    Message,
    ToolCall,
)

_MOST_REMEMBERED = 32
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_EMPTY: dict[str, dict[str, Any]] = {"message": {"content": []}, "function_call": {"arguments": ""}}
"""Content of items before their first delta."""
_UNSUPPORTED = {
    "conversation": "Use previous_response_id, or send the whole input",
    "background": "Omit it and wait for the response",
    "prompt": "Send `instructions` and `input`",
}


class _ResponsesBody(msgspec.Struct):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    text: dict[str, Any] | None = None


class Responses(Dialect):
    """OpenAI's Responses. Remembers the last responses of its session, by id."""

    path: ClassVar[str] = "responses"

    def __init__(self) -> None:
        self._chats: collections.OrderedDict[str, list[Message]] = collections.OrderedDict()

    def read(self, body: dict[str, Any]) -> ChatRequest:
        refuse(body, _UNSUPPORTED)
        found = convert(body, _ResponsesBody)
        refuse_schema((found.text or {}).get("format"), "text.format")
        messages = (
            [Message(role="system", content=found.instructions)] if found.instructions else []
        )
        return ChatRequest(
            messages=[*messages, *self._history(found), *_messages(found.input)],
            tools=functions(found.tools, "function"),
            parse_tools=parses_tools(found.tool_choice),
            max_tokens=found.max_output_tokens,
            stream=bool(found.stream),
        )

    def _history(self, body: _ResponsesBody) -> list[Message]:
        if body.previous_response_id is None:
            return []
        found = self._chats.get(body.previous_response_id)
        if found is not None:
            self._chats.move_to_end(body.previous_response_id)
        else:
            raise BadRequestError(
                f"no response of this session has the id {body.previous_response_id!r}; the last "
                f"{_MOST_REMEMBERED} are remembered. Send the whole input",
                "previous_response_id",
            )
        return found

    def write(self, answer: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
        choice = answer.choices[0]
        found = convert(body, _ResponsesBody)
        if found.store is not False:
            self._chats[f"resp_{answer.id}"] = [
                *self._history(found),
                *_messages(found.input),
                choice.message,
            ]
        if len(self._chats) > _MOST_REMEMBERED:
            self._chats.popitem(last=False)
        num_new = len(choice.token_ids)
        cut = choice.finish == "length"
        return {
            **_head(answer, body),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(_output(answer, choice)),
            "usage": {
                "input_tokens": len(answer.prompt_ids),
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_new,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(answer.prompt_ids) + num_new,
            },
        }

    def events(self, answer: ChatResponse, body: Mapping[str, Any]) -> Iterator[str]:
        whole = self.write(answer, body)
        number = -1

        def made(kind: str, **more: Any) -> str:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number, **more})

        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        yield made("response.created", response=begun)
        yield made("response.in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            place = {"item_id": item["id"], "output_index": index}
            empty = {**item, "status": "in_progress", **_EMPTY.get(item["type"], {})}
            yield made("response.output_item.added", output_index=index, item=empty)
            if item["type"] == "message":
                part = item["content"][0]
                spot = {**place, "content_index": 0}
                yield made("response.content_part.added", **spot, part={**part, "text": ""})
                yield made("response.output_text.delta", **spot, delta=part["text"], logprobs=[])
                yield made("response.output_text.done", **spot, text=part["text"], logprobs=[])
                yield made("response.content_part.done", **spot, part=part)
            elif item["type"] == "function_call":
                text = item["arguments"]
                yield made("response.function_call_arguments.delta", **place, delta=text)
                done = {**place, "arguments": text, "name": item["name"]}
                yield made("response.function_call_arguments.done", **done)
            yield made("response.output_item.done", output_index=index, item=item)
        yield made(f"response.{whole['status']}", response=whole)


def _messages(given: str | list[dict[str, Any]]) -> list[Message]:
    """Return the messages of an input; the items of one turn of the model become one message."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    found: list[Message] = []
    for index, item in enumerate(given):
        field, kind = f"input[{index}]", item.get("type", "message")
        if kind == "function_call_output":
            text = text_of(item.get("output"), field, _TEXTS)
            call_id = str(item.get("call_id"))
            found.append(Message(role="tool", content=text, tool_call_id=call_id))
            continue
        if kind == "function_call":
            call = ToolCall(
                str(item.get("call_id")), str(item.get("name")), str(item.get("arguments"))
            )
            more = Message(role="assistant", tool_calls=(call,))
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            more = Message(role="assistant", reasoning=text_of(parts, field, _TEXTS))
        elif kind == "message":
            role: Any = "system" if item.get("role") == "developer" else item.get("role")
            if role not in ("system", "user", "assistant"):
                raise BadRequestError(
                    f"role is {role!r}; expected system, developer, user or assistant", field
                )
            more = Message(
                role=role, content=text_of(item.get("content"), f"{field}.content", _TEXTS)
            )
        else:
            raise BadRequestError(f"items of type {kind!r} are not supported", field)
        if more.role == "assistant" and found and found[-1].role == "assistant":
            more = _joined(found.pop(), more)
        found.append(more)
    return found


def _joined(first: Message, second: Message) -> Message:
    return Message(
        role="assistant",
        content=first.content + second.content,
        reasoning=first.reasoning + second.reasoning,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _head(answer: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
    }


def _output(answer: ChatResponse, choice: Choice) -> Iterator[dict[str, Any]]:
    message = choice.message
    status = "incomplete" if choice.finish == "length" else "completed"
    if message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        yield {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": content}
    if message.content or not (message.tool_calls or message.reasoning):
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        yield {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }
    for call in message.tool_calls:
        yield {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
