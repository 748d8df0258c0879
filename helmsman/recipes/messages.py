"""Messages of chats: one form for the ways in which data sets write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from helmsman.recipes.rows import RowError, unlike

Messages = list[dict[str, Any]]
_KEYS = {"from": "role", "value": "content"}
_ROLES = {"human": "user", "gpt": "assistant"}
"""Keys and roles of ShareGPT, and those that chat templates know."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


class _Text(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Text] | None = None
    tool_calls: list[dict[str, Any]] = []


class Chat(msgspec.Struct, frozen=True):
    """Messages, and the other variables of the chat template."""

    messages: Messages
    variables: dict[str, Any]
    field: str
    """Field of the row, for the messages of errors."""

    def of(self, messages: Messages) -> Chat:
        """Return the chat with other messages."""
        return Chat(messages, self.variables, self.field)


def is_token_ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(type(each) is int and each >= 0 for each in value)


def messages_of(value: Any, field: str, role: str = "") -> Messages:
    """Return messages whose contents are texts, and that have no keys without values.

    Args:
        value: Messages, one message, or a text.
        field: Field of the row, for the message of an error.
        role: Role of a text; "" refuses texts.

    Raises:
        RowError: The value is no chat of texts.
    """
    found = [{"role": role, "content": value}] if isinstance(value, str) and role else value
    found = [found] if isinstance(found, Mapping) else found
    is_list = isinstance(found, list) and all(isinstance(each, Mapping) for each in found)
    if not value or not is_list:
        raise unlike(field, value, "messages with role and content" + " or a text" * bool(role))
    messages: Messages = [
        {_KEYS.get(key, key): each for key, each in message.items() if each not in (None, [])}
        for message in found
    ]
    try:
        checked = msgspec.convert(messages, list[_Message])
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at `$")
        raise RowError(f"{field}{at.rstrip('`')} is not of a chat of texts: {reason}") from error
    for index, (message, each) in enumerate(zip(messages, checked, strict=True)):
        if each.content is None and not each.tool_calls:
            raise unlike(f"{field}[{index}].content", None, "a text")
        if isinstance(each.content, list):
            each.content = "".join(part.text for part in each.content)
        message |= {"role": _ROLES.get(each.role, each.role), "content": each.content or ""}
    return messages


def variables_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that a row gives: tools, chat_template_kwargs.

    Raises:
        RowError: They have another form, or the row has images, videos or audio.
    """
    for key in _MEDIA:
        if entry.get(key) not in (None, []):
            raise unlike(repr(key), entry[key], "rows of texts only")
    tools, variables = entry.get("tools") or None, entry.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or None
        except ValueError as error:
            raise unlike("'tools'", tools, f"JSON ({error})") from error
    if not isinstance(tools, list | None) or not all(
        isinstance(each, dict) or callable(each) for each in tools or ()
    ):
        raise unlike("'tools'", tools, "a list of functions")
    if not isinstance(variables, dict) or "add_generation_prompt" in variables:
        raise unlike("'chat_template_kwargs'", variables, "variables of the chat template")
    return {"tools": tools, **variables}
