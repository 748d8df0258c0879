"""Chat messages, requests and answers in one form that all dialects convert to and from."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from helmsman.api.errors import HelmsmanError

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call that the model requests."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a chat."""

    role: Role
    content: str = ""
    reasoning: str = ""
    """Text that the model produced before its answer, for reasoning models."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Id of the call that a ``tool`` message answers."""

    def for_template(self, *, text_arguments: bool) -> dict[str, Any]:
        """Return the message in the form that chat templates read."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
            # gpt-oss takes one of content and thinking beside calls.
            found["thinking"] = "" if self.content and self.tool_calls else self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments
                        if text_arguments
                        else json_object(call.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        if self.role == "tool":
            found["tool_call_id"] = self.tool_call_id
        return found


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that an agent requests, in any dialect."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions as ``{"type": "function", "function": {name, description, parameters}}``."""
    parse_tools: bool = True
    """Whether tool calls are recognised in the model's text."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not part of it."""
    n: int = 1
    """Number of answers."""
    stream: bool = False
    logprobs: bool = False
    template_args: dict[str, Any] = {}
    """Variables of the chat template, such as ``enable_thinking``."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the model."""

    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    stop_text: str | None = None
    """The text of ``ChatRequest.stop`` that ended the answer."""
    token_ids: list[int]
    """Sampled tokens, with the end token."""
    logprobs: list[float]
    texts: list[str] = []
    """Texts of the tokens, if ``ChatRequest.logprobs`` was set."""


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to a ChatRequest."""

    id: str
    """32 hexadecimal digits."""
    created: int
    """Seconds since 1970."""
    model: str
    prompt_ids: array[int]
    choices: list[Choice]


class BadRequestError(HelmsmanError):
    """A request of an agent is invalid, unsupported or refused.

    Args:
        message: The reason and the next step.
        field: Name of the field, or ''.
        code: The vendor API's identifier of this error, such as ``context_length_exceeded``.
        status: HTTP status.
    """

    def __init__(
        self, message: str, field: str = "", code: str = "invalid_request", status: int = 400
    ) -> None:
        super().__init__(message)
        self.field, self.code, self.status = field, code, status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.field, self.code, self.status)


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        BadRequestError: The text is not a JSON object.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadRequestError(
            f"arguments of a tool call are {text[:80]!r}; expected a JSON object", "tool_calls"
        )
    return found


class Digest:
    """Identifies a chat up to a message; equal chats have equal digests."""

    def __init__(self, tools: Sequence[Any], template_args: Mapping[str, Any]) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._update([tools, template_args])

    def add(self, message: Message) -> bytes:
        """Append a message; return the digest of the chat so far.

        Ids of tool calls, reasoning, and the spacing of arguments are ignored: agents change them
        when they send a message back.
        """
        calls = [(call.name, json_object(call.arguments)) for call in message.tool_calls]
        self._update([message.role, message.content.strip(), calls])
        return self._hash.digest()

    def then(self, message: Message) -> bytes:
        """Return the digest of the chat with one more message, without appending it."""
        longer = Digest([], {})
        longer._hash = self._hash.copy()
        return longer.add(message)

    def _update(self, part: Any) -> None:
        # ASCII, since JSON of agents may have lone surrogates, which UTF-8 cannot encode
        self._hash.update(json.dumps(part, sort_keys=True).encode())
