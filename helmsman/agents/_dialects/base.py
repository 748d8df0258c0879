"""Parts of all dialects: validation of bodies, tools and texts."""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from helmsman.agents._messages import Answer, BadRequestError, ChatRequest

T = TypeVar("T")


class Dialect(abc.ABC):
    """Translates between the bodies of a vendor's API and chats."""

    path: ClassVar[str]
    """Path of the API below ``/v1``."""

    @abc.abstractmethod
    def read(self, body: dict[str, Any]) -> ChatRequest:
        """Return the turn that a body requests.

        Raises:
            BadRequestError: The body is invalid or asks for something unsupported.
        """

    @abc.abstractmethod
    def write(self, answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of the response.

        Args:
            answer: The answers of the model.
            body: The body of the request.
        """

    @abc.abstractmethod
    def events(self, answer: Answer, body: Mapping[str, Any]) -> Iterator[str]:
        """Return the response as server-sent events."""

    @abc.abstractmethod
    def error(self, status: int, message: str, *, field: str, code: str) -> dict[str, Any]:
        """Return the body of an error, in the vendor's form."""

    ping = ": waiting for the model\n\n"
    """Event that keeps a connection open while the model generates."""


def convert(body: Any, kind: type[T]) -> T:
    """Validate a body.

    Raises:
        BadRequestError: A field is missing or of a wrong type.
    """
    try:
        return msgspec.convert(body, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        reason, _, at = str(error).partition(" - at `$")
        raise BadRequestError(reason, at.strip("`.")) from error


def refuse(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse unsupported fields that are set.

    Args:
        body: The body of a request.
        reasons: Fields, and the next step for each.

    Raises:
        BadRequestError: A field is set.
    """
    for field, step in reasons.items():
        if body.get(field) not in (None, False, 0, 0.0, "", [], {}):
            raise BadRequestError(f"{field} is not supported by this gateway. {step}", field)


def text_of(content: Any, field: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content: a text, or a list of parts.

    Args:
        content: The content; None is an empty text.
        field: Name of the field, for errors.
        kinds: Types of parts that have a text.

    Raises:
        BadRequestError: A part is an image or of another type.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequestError(f"expected a text or a list of parts, got {content!r:.40}", field)
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            images = "image" in str(kind)
            raise BadRequestError(
                "images are not supported yet; send text only"
                if images
                else f"parts of type {kind!r} are not supported; expected {' or '.join(kinds)}",
                f"{field}[{index}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def function(tool: Any, field: str, schema: str = "parameters") -> dict[str, Any]:
    """Return a tool in the form that chat templates read.

    Args:
        tool: The tool, with ``name`` and ``description``.
        field: Name of its field in the body, for errors.
        schema: Key of the JSON schema of its arguments.

    Raises:
        BadRequestError: The tool or its schema is no object, or its name is no text.
    """
    if not isinstance(tool, dict):
        raise BadRequestError(f"a tool is {tool!r:.40}; expected an object", field)
    name, parameters = tool.get("name"), tool.get(schema)
    if not isinstance(name, str) or not name:
        raise BadRequestError(f"a tool's name is {name!r}; expected a text", field)
    if parameters is not None and not isinstance(parameters, dict):
        raise BadRequestError(f"the {schema} of {name!r} are no JSON schema", field)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.get("description") or "",
            "parameters": parameters or {"type": "object", "properties": {}},
        },
    }


def event(data: Any, name: str = "") -> str:
    """Return one server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"
