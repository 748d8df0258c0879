"""The Chat Completions API of OpenAI: its requests, answers, streams and errors."""

from __future__ import annotations

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

_UNSUPPORTED = {
    "functions": "Use `tools`",
    "function_call": "Use `tool_choice`",
    "logit_bias": "Omit it: it would change the policy that is trained",
    "presence_penalty": "Omit it: it would change the policy that is trained",
    "frequency_penalty": "Omit it: it would change the policy that is trained",
    "top_logprobs": "Only the log-probability of each sampled token is known",
    "audio": "Send text only",
}


class _ToolFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct):
    function: _ToolFunction
    id: str = ""


class _ChatMessage(msgspec.Struct):
    role: str
    content: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _ChatBody(msgspec.Struct):
    messages: list[_ChatMessage]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_ROLES = {"developer": "system", "function": "tool"}


class ChatCompletions(Dialect):
    """OpenAI's Chat Completions, with ``reasoning_content`` as vLLM and SGLang have it."""

    path: ClassVar[str] = "chat/completions"

    def read(self, body: dict[str, Any]) -> ChatRequest:
        refuse(body, _UNSUPPORTED)
        found = convert(body, _ChatBody)
        refuse_schema(found.response_format, "response_format")
        return ChatRequest(
            messages=[_message(each, f"messages[{i}]") for i, each in enumerate(found.messages)],
            tools=functions(found.tools, "function", "function"),
            parse_tools=parses_tools(found.tool_choice),
            max_tokens=found.max_tokens
            if found.max_completion_tokens is None
            else found.max_completion_tokens,
            stop=(found.stop,) if isinstance(found.stop, str) else tuple(found.stop or ()),
            n=1 if found.n is None else found.n,
            stream=bool(found.stream),
            logprobs=bool(found.logprobs),
            template_args=found.chat_template_kwargs or {},
        )

    def write(self, answer: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(answer.choices):
            message = choice.message
            content = None if message.tool_calls and not message.content else message.content
            made: dict[str, Any] = {"role": "assistant", "content": content}
            if message.reasoning:
                made["reasoning_content"] = message.reasoning
            if message.tool_calls:
                made["tool_calls"] = [_call(each) for each in message.tool_calls]
            choices.append(
                {
                    "index": index,
                    "message": made,
                    "finish_reason": choice.finish,
                    "logprobs": _logprobs(choice),
                    **({"token_ids": choice.token_ids} if body.get("return_token_ids") else {}),
                }
            )
        return {
            **_head(answer, "chat.completion"),
            "choices": choices,
            "usage": _usage(answer),
            **(
                {"prompt_token_ids": list(answer.prompt_ids)}
                if body.get("return_token_ids")
                else {}
            ),
        }

    def events(self, answer: ChatResponse, body: Mapping[str, Any]) -> Iterator[str]:
        head = _head(answer, "chat.completion.chunk")

        def chunk(index: int, delta: dict[str, Any], **more: Any) -> str:
            choice = {"index": index, "delta": delta, "finish_reason": None, **more}
            return event({**head, "choices": [choice]})

        for index, choice in enumerate(answer.choices):
            message = choice.message
            yield chunk(index, {"role": "assistant", "content": ""})
            if message.reasoning:
                yield chunk(index, {"reasoning_content": message.reasoning})
            if message.content:
                more = _logprobs(choice)
                yield chunk(index, {"content": message.content}, logprobs=more)
            for number, call in enumerate(message.tool_calls):
                yield chunk(index, {"tool_calls": [{"index": number, **_call(call)}]})
            yield chunk(index, {}, finish_reason=choice.finish)
        if (body.get("stream_options") or {}).get("include_usage"):
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield "data: [DONE]\n\n"


def _message(found: _ChatMessage, field: str) -> Message:
    role: Any = _ROLES.get(found.role, found.role)
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequestError(
            f"role is {found.role!r}; expected system, developer, user, assistant or tool", field
        )
    calls = found.tool_calls or []
    return Message(
        role=role,
        content=text_of(found.content, f"{field}.content", ("text", "refusal")),
        reasoning=found.reasoning_content or found.reasoning or "",
        tool_calls=tuple(
            ToolCall(each.id, each.function.name, each.function.arguments) for each in calls
        ),
        tool_call_id=found.tool_call_id or "",
    )


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _head(answer: ChatResponse, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
    }


def _usage(answer: ChatResponse) -> dict[str, int]:
    num_new = sum(len(each.token_ids) for each in answer.choices)
    return {
        "prompt_tokens": len(answer.prompt_ids),
        "completion_tokens": num_new,
        "total_tokens": len(answer.prompt_ids) + num_new,
    }


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    if not choice.texts:
        return None
    return {
        "content": [
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for text, logprob in zip(choice.texts, choice.logprobs, strict=True)
        ],
        "refusal": None,
    }
