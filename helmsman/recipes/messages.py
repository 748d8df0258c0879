"""Messages of chats: one form for the ways in which data sets write them."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from helmsman.recipes.rows import RowError, unlike

Messages = list[dict[str, Any]]
_KEYS = {"from": "role", "value": "content"}
_ROLES = {
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
    "human": "user",
}
"""Keys and roles of ShareGPT and of old chats, and those that chat templates know."""
_CALLS = ("function_call", "tool_call", "tool_calls")
_WEIGHTS = ("weight", "train", "training", "loss")
"""Keys of a message that say whether it is trained on, by 0 or 1."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_UNREAD = {
    **dict.fromkeys(_MEDIA, "rows of texts only"),
    **dict.fromkeys(("train_detail", "training_detail"), "'train' of whole messages"),
    "history": "its turns as messages in front of the prompt",
    "documents": "them in a message, or in 'chat_template_kwargs'",
}
"""Keys of rows and messages that would change the tokens, and are not read."""
_SYSTEM = ("system", "system_prompt", "system_message")
_BESIDE = ("instruction", "input", "context")
"""Columns with the text of a system message, and columns that belong into a prompt."""
_STORED = re.compile(
    r"""\s*(array\()?\[?\s*\{(?=.*['"](role|from)['"]\s*:)(?=.*['"](content|value)['"]\s*:)"""
    r""".*\}\s*\]?(, dtype=object\))?\s*""",
    re.DOTALL,
)
"""A chat that was written as a text, as in a cell of CSV."""


class _Text(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Function(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str | None = None


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text] | None = None
    tool_calls: list[_Call] = []


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
    """Return whether a value is a list of token ids."""
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
    found = found if isinstance(found, list) else [found]
    if not value or not all(isinstance(each, dict) for each in found):
        raise unlike(field, value, "messages with role and content" + " or a text" * bool(role))
    return [_message(message, f"{field}[{at}]") for at, message in enumerate(found)]


def _message(given: dict[str, Any], at: str) -> dict[str, Any]:
    """Return a message with a text, and with the keys and roles that chat templates know."""
    message = dict[str, Any]()
    for key, each in given.items():
        name = _KEYS.get(key, key)
        if each not in (None, []) and message.setdefault(name, each) != each:
            raise unlike(f"{at}.{key}", each, f"one {name}")
    _require_read(message, f"{at}.")
    if "role" in message:
        role = str(message["role"]).lower()
        is_result = role == "function" and "name" in message  # without a name it may be a call
        message["role"] = "tool" if is_result else _ROLES.get(role, role)
        if role == "function_call":
            message |= {"function_call": message.get("content"), "content": ""}
    for key in _CALLS:
        if calls := message.pop(key, None):
            calls = decoded(calls, f"{at}.{key}")
            message["tool_calls"] = _functions(calls if isinstance(calls, list) else [calls])
    is_answer = message.get("role") == "assistant"
    for key in _WEIGHTS:
        if (weight := message.pop(key, None)) not in ((None, 0, 1) if is_answer else (None, 0)):
            raise unlike(f"{at}.{key}", weight, "0 or 1 for the assistant, 0 for others")
        if is_answer and weight == 0:
            message["weight"] = 0
    try:
        checked = msgspec.convert(message, _Message)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        raise RowError(f"{at}{path.rstrip('`')} is not of a chat of texts: {reason}") from error
    if (content := checked.content) is None and not checked.tool_calls:
        raise unlike(f"{at}.content", None, "a text")
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    return {**message, "content": text}


def _functions(found: Iterable[Any]) -> list[Any]:
    """Return functions or calls, each in the form that names its type."""
    return [
        {"type": "function", "function": each}
        if isinstance(each, dict) and "name" in each and "function" not in each
        else each
        for each in found
    ]


def decoded(value: Any, field: str) -> Any:
    """Return a value that may be written as JSON, or as Python writes it.

    Args:
        value: A text, or another value, which is returned as it is.
        field: Field of the row, for the message of an error.

    Raises:
        RowError: The text is neither.
    """
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError):
            return read(value)
    raise unlike(field, value, "JSON")


def _require_read(entry: dict[str, Any], at: str = "") -> None:
    for key, expected in _UNREAD.items():
        if entry.get(key) not in (None, [], ""):
            raise unlike(f"{at}{key}" if at else repr(key), entry[key], expected)


def with_columns(
    entry: dict[str, Any], begin: Iterable[str], others: Iterable[str] = (), role: str = ""
) -> dict[str, Any]:
    """Return a row whose chats are no texts, and begin with the row's system prompt.

    Args:
        entry: The row.
        begin: Keys with the beginning of a chat.
        others: Other keys that are read.
        role: Role of a text at the beginning; "" if there is no prompt apart.

    Raises:
        RowError: A chat cannot be decoded, or a column that belongs to it is not part of it.
    """
    made, read = dict(entry), {*begin, *others}
    for key in read:
        if isinstance(text := entry.get(key), str) and _STORED.fullmatch(text):
            made[key] = decoded(text, repr(key))
    columns = [each for each in (*_SYSTEM, *_BESIDE * bool(role)) if made.get(each)]
    for key, column in itertools.product(begin, columns):
        text, prompt = made[column], made.get(key)
        if prompt is None or column in read:
            continue
        if not isinstance(text, str):
            raise unlike(repr(column), text, "a text")
        if isinstance(prompt, str) and text in prompt:
            continue
        chat = messages_of(prompt, repr(key), role)
        contents = [each["content"] for each in chat]
        if column in _SYSTEM and chat[0]["role"] not in ("system", "developer"):
            made[key] = [{"role": "system", "content": text}, *chat]
        elif text not in (contents if column in _SYSTEM else "\n".join(contents)):
            raise unlike(repr(column), text, f"a text that is in {key!r}. Join them")
    return made


def variables_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that a row gives: tools, chat_template_kwargs.

    Raises:
        RowError: They have another form, or the row has columns that are not read.
    """
    _require_read(entry)
    variables = entry.get("chat_template_kwargs") or {}
    tools = decoded(entry.get("tools") or entry.get("functions") or [], "'tools'") or []
    if not isinstance(tools, list) or not all(isinstance(x, dict) or callable(x) for x in tools):
        raise unlike("'tools'", tools, "a list of functions")
    if not isinstance(variables, dict) or "add_generation_prompt" in variables:
        raise unlike("'chat_template_kwargs'", variables, "variables of the chat template")
    return {"tools": _functions(tools) or None, **variables}


def require_named(variables: dict[str, Any], text: str) -> None:
    """Check that a text around which no template is put names the functions of its row.

    Raises:
        RowError: It names not all of them.
    """
    for tool in variables.get("tools") or ():
        name = tool.get("function", tool).get("name") if isinstance(tool, dict) else tool.__name__
        if str(name) not in text:
            raise unlike("'tools'", name, "a chat, or a prompt that has this function")
