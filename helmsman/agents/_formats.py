"""Forms in which model families write reasoning and calls of tools."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from helmsman.agents._messages import ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by tool."""
Call = tuple[str, Mapping[str, Any]]


class Parsed(NamedTuple):
    """The parts of a model's text."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    reasoning_span: tuple[int, int]
    """Place of the reasoning in the text; empty without one."""
    body: int
    """Place where content and calls of tools begin."""


class Format(NamedTuple):
    """How a model family writes calls of tools."""

    name: str
    marker: str
    """Text of a chat template by which the family is recognised."""
    calls: re.Pattern[str]
    """Matches one call, or a list of calls."""
    read: Callable[[re.Match[str], Schemas], list[Call]]
    """Returns the calls in a match; raises ValueError for malformed ones."""


class ModelFormat:
    """Splits the text of a model family into reasoning, content and calls of tools.

    Args:
        template: The model's chat template.
        family: Name of the form of tool calls; recognised from the template when None.

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
        """Split a text that the model produced.

        Args:
            text: The text without its end token.
            prompt_end: The end of the prompt, which may have opened the reasoning.
            tools: The functions that the model may call.
            has_tools: Whether calls of tools are recognised.
        """
        if self.family == "gptoss":
            return _parse_harmony(text, has_tools=has_tools)
        reasoning, span, body = self._split(text, prompt_end)
        rest = text[body:]
        calls: list[Call] = []
        content = rest
        if has_tools and (found := list(self._format.calls.finditer(rest))):
            schemas = {
                each["function"]["name"]: each["function"].get("parameters") or {} for each in tools
            }
            try:
                calls = [call for each in found for call in self._format.read(each, schemas)]
            except (ValueError, TypeError, KeyError, SyntaxError, RecursionError):
                calls = []  # malformed calls stay text, which the agent can answer
            if calls:
                content = rest[: found[0].start()]
        return Parsed(reasoning, content.strip(), _made(calls), span, body)

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


def _made(calls: Sequence[Call]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, json.dumps(arguments, ensure_ascii=False))
        for name, arguments in calls
    )


_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


# --- calls of tools -------------------------------------------------------------------------------


def _of_json(found: Any) -> Iterator[Call]:
    for each in found if isinstance(found, list) else [found]:
        arguments = each.get("arguments", each.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(each["name"], str) or not isinstance(arguments, dict):
            raise ValueError("a call needs a name and an object of arguments")
        yield each["name"], arguments


def _read_json(match: re.Match[str], _: Schemas) -> list[Call]:
    return list(_of_json(json.loads(match[1])))


def _read_llama(match: re.Match[str], schemas: Schemas) -> list[Call]:
    calls = [call for part in match[1].split(";") for call in _of_json(json.loads(part))]
    if any(name not in schemas for name, _ in calls):
        raise ValueError("an answer in JSON, not a call")
    return calls


def _read_named(match: re.Match[str], _: Schemas) -> list[Call]:
    arguments = json.loads(match[2])
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")
    return [(match[1].strip(), arguments)]


def _read_mistral(match: re.Match[str], schemas: Schemas) -> list[Call]:
    text = match[1].strip()
    if text.startswith("["):
        return list(_of_json(json.loads(text)))
    return [call for each in _MISTRAL_NAMED.finditer(text) for call in _read_named(each, schemas)]


_MISTRAL_NAMED = re.compile(r"([\w.\-]+)(?:\[ARGS\])?\s*(\{.*\})\s*$", re.DOTALL)


def _typed(value: str, schema: Any) -> Any:
    """Convert the text of an argument by its schema."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _read_pairs(pairs: re.Pattern[str]) -> Callable[[re.Match[str], Schemas], list[Call]]:
    def read(match: re.Match[str], schemas: Schemas) -> list[Call]:
        name = match[1].strip()
        if not name:
            raise ValueError("a call without a name")
        kinds = schemas.get(name, {}).get("properties", {})
        return [
            (name, {key: _typed(value, kinds.get(key)) for key, value in pairs.findall(match[2])})
        ]

    return read


def _read_python(match: re.Match[str], _: Schemas) -> list[Call]:
    tree = ast.parse(match[1].strip(), mode="eval").body
    calls = tree.elts if isinstance(tree, ast.List) else [tree]
    found: list[Call] = []
    for each in calls:
        if not isinstance(each, ast.Call) or each.args:
            raise ValueError("expected calls with named arguments")
        named = {str(word.arg): ast.literal_eval(word.value) for word in each.keywords}
        found.append((ast.unparse(each.func), named))
    return found


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


FORMATS = (
    Format(
        "deepseek",
        "tool▁calls▁begin",
        _pattern(
            r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
            r"([^\n<]+?)(?:\n```json\n|<｜tool▁sep｜>)(.*?)(?:\n```)?<｜tool▁call▁end｜>"
        ),
        _read_named,
    ),
    Format("gptoss", "<|channel|>", _pattern(r"(?!)"), _read_json),
    Format(
        "glm",
        "<arg_key>",
        _pattern(r"<tool_call>([^\n<]*)(.*?)</tool_call>"),
        _read_pairs(_pattern(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>")),
    ),
    Format(
        "qwen_xml",
        "<function=",
        _pattern(r"<tool_call>\s*<function=([^>\n]*)>(.*?)</function>\s*</tool_call>"),
        _read_pairs(_pattern(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>")),
    ),
    Format(
        "mistral",
        "[TOOL_CALLS]",
        _pattern(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|$)"),
        _read_mistral,
    ),
    Format(
        "pythonic",
        "<|tool_call_start|>",
        _pattern(r"<\|tool_call_start\|>(.*?)<\|tool_call_end\|>"),
        _read_python,
    ),
    Format("hermes", "<tool_call>", _pattern(r"<tool_call>(.*?)</tool_call>"), _read_json),
    Format(
        "llama", '"parameters":', _pattern(r"^\s*(?:<\|python_tag\|>)?(\{.*\})\s*$"), _read_llama
    ),
)
"""Families whose template has the marker, most specific first."""


_HARMONY = _pattern(
    r"(?:<\|start\|>assistant)?(?: to=([\w.\-]+))?<\|channel\|>(\w+)(?: to=([\w.\-]+))?[^<]*"
    r"(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|<\|call\|>|<\|return\|>|$)"
)


def _parse_harmony(text: str, *, has_tools: bool) -> Parsed:
    """Parse the channels of gpt-oss: analysis, commentary with calls, and final."""
    reasoning, content, calls = [], [], list[Call]()
    span, body = (0, 0), 0
    for match in _HARMONY.finditer(text):
        to = match[1] or match[3] or ""
        if to.startswith("functions.") and has_tools:
            try:
                arguments = json.loads(match[4])
                calls += [(to.removeprefix("functions."), arguments)] * isinstance(arguments, dict)
            except (ValueError, RecursionError):
                content.append(match[4])
        elif match[2] == "analysis":
            reasoning.append(match[4])
            span, body = match.span(4), match.end()
        else:
            content.append(match[4])
    if not (reasoning or content or calls):
        content = [text]
    return Parsed("\n".join(reasoning), "".join(content).strip(), _made(calls), span, body)
