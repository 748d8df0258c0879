"""Parts of all dialects: validation of bodies, tools and texts."""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from helmsman.agents._messages import BadRequestError, ChatRequest, ChatResponse

T = TypeVar("T")


class Dialect(abc.ABC):
    """Translates between the bodies of a vendor's API and chats."""

    path: ClassVar[str]
    """Path of the API below ``/v1``."""
    ping = ": waiting for the model\n\n"
    """Event that keeps a connection open while the model generates."""

    @abc.abstractmethod
    def read(self, body: dict[str, Any]) -> ChatRequest:
        """Return the turn that a body requests.

        Raises:
            BadRequestError: The body is invalid or asks for something unsupported.
        """

    @abc.abstractmethod
    def write(self, answer: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response's body for the model's answers, and the body of the request."""

    @abc.abstractmethod
    def events(self, answer: ChatResponse, body: Mapping[str, Any]) -> Iterator[str]:
        """Return the response as server-sent events."""

    def error(self, status: int, message: str, *, field: str, code: str) -> dict[str, Any]:
        """Return the body of an error in the vendor's form, by default OpenAI's."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )
        return {"error": {"message": message, "type": kind, "param": field or None, "code": code}}


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
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"{error.object[:40]!a} has a lone surrogate, which only a text in the chat may have. "
            "Remove it"
        ) from error


def refuse(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse unsupported fields that are set, with the next step for each.

    Raises:
        BadRequestError: A field is set.
    """
    for field, step in reasons.items():
        if body.get(field) not in (None, False, 0, 0.0, "", [], {}):
            raise BadRequestError(f"{field} is not supported by this gateway. {step}", field)


def refuse_schema(form: Any, field: str) -> None:
    """Refuse a form of answers other than text.

    Raises:
        BadRequestError: Another form is requested.
    """
    if form is not None and not (isinstance(form, dict) and form.get("type", "text") == "text"):
        raise BadRequestError(
            "output that follows a JSON schema is not supported; ask for JSON in the prompt", field
        )


def parses_tools(choice: Any) -> bool:
    """Return whether tool calls are recognised.

    Raises:
        BadRequestError: The choice forces a call, which needs constrained decoding.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto", "none"):
        return bool(kind != "none")
    raise BadRequestError(
        f"tool_choice is {kind!r}, which forces the model to call a tool; expected 'auto' or "
        "'none'. Ask for the call in the prompt",
        "tool_choice",
    )


def text_of(content: Any, field: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content: a text, or a list of parts of some kinds.

    Raises:
        BadRequestError: A part is an image or of another type.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequestError(f"expected a string or a list of parts, got {content!r:.40}", field)
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


def functions(
    tools: Sequence[Any] | None, kind: str, key: str = "", schema: str = "parameters"
) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates read.

    Args:
        tools: The tools of a request.
        kind: Type of the tools that run at the agent; others run at the vendor.
        key: Key of a tool's description; '' if the tool is its own.
        schema: Key of the JSON schema of its arguments.

    Raises:
        BadRequestError: A tool is of another type or not well-formed.
    """
    found = []
    for index, tool in enumerate(tools or ()):
        field = f"tools[{index}]"
        if isinstance(tool, dict) and tool.get("type", kind) != kind:
            raise BadRequestError(
                f"tools of type {tool['type']!r} run on the vendor's servers; expected {kind} "
                "tools",
                field,
            )
        if key and isinstance(tool, dict):
            tool = tool.get(key)
        if not isinstance(tool, dict):
            raise BadRequestError(f"a tool is {tool!r:.40}; expected an object", field)
        name, parameters = tool.get("name"), tool.get(schema)
        if not isinstance(name, str) or not name:
            raise BadRequestError(f"a tool's name is {name!r}; expected a string", field)
        if parameters is not None and not isinstance(parameters, dict):
            raise BadRequestError(f"{schema} of {name!r} is not a JSON schema", field)
        description = tool.get("description") or ""
        parameters = parameters or {"type": "object", "properties": {}}
        inner = {"name": name, "description": description, "parameters": parameters}
        found.append({"type": "function", "function": inner})
    return found


def event(data: Mapping[str, Any]) -> str:
    """Return one server-sent event, which has the name of its type, if any."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"
