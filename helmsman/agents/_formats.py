"""Text formats in which model families write reasoning and tool calls."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from helmsman.agents._messages import ToolCall

Schemas = Mapping[str, Any]
"""JSON schemas of the arguments, by tool; any JSON, since they come from agents."""
Call = tuple[Any, Any]
"""Name and arguments as the model wrote them."""


class Parsed(NamedTuple):
    """The parts of a model's text."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    reasoning_span: tuple[int, int]
    """Place of the reasoning in the text; empty without one."""
    body: int
    """Place where content and tool calls begin."""


class Format(NamedTuple):
    """The format in which a model family writes tool calls."""

    name: str
    marker: str
    """Text of a chat template by which the family is recognised."""
    opening: str
    """Pattern of the text before a call, or a list of calls; its group is the tool's name."""
    closing: str
    """Pattern of the text after it. Both take linear time to search, for texts of any kind."""
    read: Callable[[str, str, Schemas], list[Call]]
    """Returns the calls between them; gets '' for the name if the opening has none."""


class ModelFormat:
    """Splits the text of a model family into reasoning, content and tool calls.

    Raises:
        ValueError: The family is unknown.
    """

    def __init__(self, template: str, family: str | None = None) -> None:
        known = {each.name: each for each in FORMATS}
        if family is not None and family not in known:
            raise ValueError(f"family is {family!r}; expected one of {', '.join(known)}")
        found = next((each for each in FORMATS if each.marker in template), known["hermes"])
        self._format = found if family is None else known[family]
        self.family = self._format.name
        self._thinks = next((each for each in _THOUGHTS if each[1] in template), None)

    @property
    def can_think(self) -> bool:
        """Whether the model writes reasoning before its answer."""
        return self._thinks is not None or self.family == "gptoss"

    def closing(self, prompt_end: str) -> str:
        """Return the text that ends the reasoning which a prompt has opened; '' if it has not."""
        opened = self._thinks is not None and prompt_end.rstrip().endswith(self._thinks[0])
        return self._thinks[1] if self._thinks is not None and opened else ""

    def parse(
        self, text: str, prompt_end: str, tools: Sequence[Mapping[str, Any]], *, has_tools: bool
    ) -> Parsed:
        """Split a text that the model produced."""
        if self.family == "gptoss":
            return _parse_harmony(text, self._format, has_tools=has_tools)
        reasoning, span, body = self._split(text, prompt_end)
        rest = text[body:]
        found = list(_between(self._format.opening, self._format.closing, rest))
        named = [("".join(head.groups()), inner) for head, inner in found if has_tools]
        calls = _calls(self._format, named, tools)
        content = rest[: found[0][0].start()] if calls else rest
        return Parsed(reasoning, content.strip(), calls, span, body)

    def _split(self, text: str, prompt_end: str) -> tuple[str, tuple[int, int], int]:
        """Return the reasoning, its place, and the place where the answer begins."""
        if self._thinks is None:
            return "", (0, 0), 0
        opening, closing = self._thinks
        start = 0
        if not prompt_end.rstrip().endswith(opening):
            lead = re.match(rf"\s*{re.escape(opening)}", text)
            if lead is None and closing not in text:
                return "", (0, 0), 0
            start = lead.end() if lead else 0
        end = text.find(closing, start)
        if end < 0:  # cut off inside of the reasoning
            return text[start:].strip(), (start, len(text)), len(text)
        body = end + len(closing)
        body += len(text[body:]) - len(text[body:].lstrip())
        return text[start:end].strip(), (start, end), body


def _between(opening: str, closing: str, text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each match of ``opening``, and the text from there to the next match of ``closing``."""
    start, stop, end = re.compile(opening), re.compile(closing), 0
    while (head := start.search(text, end)) and (tail := stop.search(text, head.end())):
        yield head, text[head.end() : tail.start()]
        end = tail.end()


def _calls(
    form: Format, found: Iterable[tuple[str, str]], tools: Sequence[Mapping[str, Any]]
) -> tuple[ToolCall, ...]:
    """Return the calls in texts with their names; none if one is malformed, so that it is text."""
    try:
        functions = [each["function"] for each in tools]
        schemas = {each["name"]: each.get("parameters") for each in functions}
        return tuple(
            _made(*call) for name, text in found for call in form.read(name, text, schemas)
        )
    except Exception:  # noqa: BLE001 - a model's text may break a reader in any way
        return ()


def _made(name: Any, arguments: Any) -> ToolCall:
    """Return a call; raise an exception if it cannot be sent as plain JSON."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    json.loads("[" * 99 + text + "]" * 99)  # readers of the call, such as Digest, recurse further
    (name + text).encode()
    if not name or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and an object of arguments")
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, text)


_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def _read_json(name: str, text: str, _: Schemas) -> list[Call]:
    found = json.loads(text)
    if name:
        return [(name.strip(), found)]
    calls = []
    for each in found if isinstance(found, list) else [found]:
        arguments = each.get("arguments", each.get("parameters", {}))
        is_text = isinstance(arguments, str)
        calls.append((each["name"], json.loads(arguments) if is_text else arguments))
    return calls


def _read_llama(_: str, text: str, schemas: Schemas) -> list[Call]:
    parts = re.split(r"(?<=\});\s*(?=\{)", text)
    calls = [call for part in parts for call in _read_json("", part, schemas)]
    if any(name not in schemas for name, _ in calls):
        raise ValueError("an answer in JSON, not a call")
    return calls


def _typed(value: str, schema: Any) -> Any:
    """Convert the text of an argument by its schema."""
    if _child(schema, "type") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _child(schema: Any, key: str) -> Any:
    return schema.get(key) if isinstance(schema, Mapping) else None


def _read_pairs(opening: str, closing: str) -> Callable[[str, str, Schemas], list[Call]]:
    def read(name: str, text: str, schemas: Schemas) -> list[Call]:
        name = name.strip()
        kinds = _child(schemas.get(name), "properties")
        pairs = _between(opening, closing, text)
        return [(name, {head[1]: _typed(value, _child(kinds, head[1])) for head, value in pairs})]

    return read


def _read_python(_: str, text: str, __: Schemas) -> list[Call]:
    tree = ast.parse(text.strip(), mode="eval").body
    found: list[Call] = []
    for each in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(each, ast.Call) or each.args:
            raise ValueError("expected calls with named arguments")
        named = {str(word.arg): ast.literal_eval(word.value) for word in each.keywords}
        found.append((ast.unparse(each.func), named))
    return found


FORMATS = (
    Format(
        "deepseek",
        "tool▁calls▁begin",
        r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
        r"([^\n<]++)(?:\n```json\n|<｜tool▁sep｜>)",
        r"(?:\n```)?<｜tool▁call▁end｜>",
        _read_json,
    ),
    Format(
        "gptoss",
        "<|channel|>",
        r"(?: to=([\w.\-]++))?<\|channel\|>(\w++)(?: to=([\w.\-]++))?"
        r"[^<]*+(?:<\|constrain\|>[^<]*+)?<\|message\|>",
        r"<\|(?:end|start|call|return)\|>|\Z",
        _read_json,
    ),
    Format(
        "glm",
        "<arg_key>",
        r"<tool_call>([^\n<]*+)",
        r"</tool_call>",
        _read_pairs(r"<arg_key>([^<]*+)</arg_key>\s*<arg_value>", r"</arg_value>"),
    ),
    Format(
        "qwen_xml",
        "<function=",
        r"<tool_call>\s*<function=([^<>\n]*+)>",
        r"</function>\s*</tool_call>",
        _read_pairs(r"<parameter=([^<>\n]*+)>\n?", r"\n?</parameter>"),
    ),
    Format(
        "mistral",
        "[TOOL_CALLS]",
        r"\[TOOL_CALLS\]\s*([\w.\-]*+)(?:\[ARGS\])?",
        r"(?=\[TOOL_CALLS\])|\Z",
        _read_json,
    ),
    Format(
        "pythonic",
        "<|tool_call_start|>",
        r"<\|tool_call_start\|>",
        r"<\|tool_call_end\|>",
        _read_python,
    ),
    Format("hermes", "<tool_call>", r"<tool_call>", r"</tool_call>", _read_json),
    Format("llama", '"parameters":', r"\A\s*(?:<\|python_tag\|>)?(?=\{)", r"\Z", _read_llama),
)
"""Families whose template has the marker, most specific first."""


def _parse_harmony(text: str, form: Format, *, has_tools: bool) -> Parsed:
    """Parse the channels of gpt-oss: analysis, commentary with calls, and final."""
    reasoning, content, calls = list[str](), list[str](), list[ToolCall]()
    span, body = (0, 0), 0
    for head, inner in _between(form.opening, form.closing, text):
        to = head[1] or head[3] or ""
        is_call = has_tools and to.startswith("functions.")
        if is_call and (made := _calls(form, [(to.removeprefix("functions."), inner)], ())):
            calls += made
        elif head[2] == "analysis" and not is_call:
            reasoning.append(inner)
            span = head.end(), head.end() + len(inner)
            body = body if content else span[1]
        else:
            content.append(inner)
            body = head.end()  # the template writes the header before it
    if not (reasoning or content or calls):
        content = [text]
    return Parsed("\n".join(reasoning), "".join(content).strip(), tuple(calls), span, body)
