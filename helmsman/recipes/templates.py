"""Chat templates: the forms of messages that they take, and what they make of chats."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from typing import Any

from helmsman.recipes.messages import Chat, Messages
from helmsman.recipes.rows import RowError, unlike
from helmsman.recipes.settings import Data

_WORD, _CALL = "Zq7", {"Zq7": 1}
"""Content, and arguments of a call, in the chats that show how a template renders."""
_TOOL = {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}}
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message with text that comes before its content."""
_WORDS = re.compile(r"\w+|[^\w\s<>/|]")
"""Words and signs of a text, but not those of tags, which templates may write otherwise."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PARAGRAPHS = (
    "{{ start }}{% for m in messages %}{{ '\n\n' if not loop.first }}{{ m.role | capitalize }}:"
    "{{ m.content + eos_token if m.role == 'assistant' else ' ' + m.content }}{% endfor %}"
    "{{ '\n\nAssistant:' if add_generation_prompt }}"
)
"""Template for models without one: a form that models trained on plain text can continue."""


def _chat(role: str, content: str, arguments: Any = None, tools: Any = None) -> Chat:
    """Return a short chat with a message of this role, perhaps with a tool call."""
    message: dict[str, Any] = {"role": role, "content": content}
    if arguments is not None:
        function = {"name": "f", "arguments": arguments}
        message["tool_calls"] = [{"type": "function", "id": "call00000", "function": function}]
    user = {"role": "user", "content": "hi"}
    chats = {"user": [message], "developer": [message, user], "assistant": [user, message]}
    return Chat(chats[role], {"tools": tools}, "chat")


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def _parts(message: dict[str, Any]) -> list[str]:
    """Return the names of the parts that a template has to render."""
    calls = [f".tool_calls[{at}]" for at in range(len(message.get("tool_calls", ())))]
    return [".content", *calls] if message["content"].strip() else calls


def _with_words(message: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
    """Return a message with words in place of some of its parts, by their names."""
    made = {**message, "content": words.get(".content", message["content"])}
    if "tool_calls" in message:
        found = [(f".tool_calls[{at}]", call) for at, call in enumerate(message["tool_calls"])]
        made["tool_calls"] = [
            _with_arguments(call, {words[name]: 1}) if name in words else call
            for name, call in found
        ]
    return made


def _left_out(field: str) -> RowError:
    return RowError(
        f"{field} is left out by the chat template, expected one that renders it "
        "(data.chat_template)"
    )


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: The Hugging Face tokenizer.
        data: Settings with the variables of the template, and the system prompt for chats without.
        stops: Tokens at which generation ends.
    """

    def __init__(self, tokenizer: Any, data: Data, stops: Collection[int]) -> None:
        self._tokenizer, self._variables = tokenizer, dict(data.template_args)
        self._system: str | None = None
        self._roles: dict[str, str] = {}
        self.is_given = bool(tokenizer.chat_template)
        """Whether the tokenizer has a template; chats become paragraphs otherwise."""
        if not self.is_given:
            has_start = tokenizer.encode("a")[0] == tokenizer.bos_token_id
            start = tokenizer.bos_token if has_start else ""
            self._variables |= {"chat_template": _PARAGRAPHS, "start": start}
        self._has_parts, self._takes, self.end = set[bool](), {str, dict}, ""
        for role in ("user", "assistant"):
            text = self._try(_chat(role, _WORD))
            if _WORD not in text and (text or self._has_parts):
                self._has_parts.add(role == "assistant")
        has_developer = _WORD in self._try(_chat("developer", _WORD))
        self._roles = {} if has_developer else {"developer": "system"}
        self._takes = {
            type(arguments)
            for tools in (None, [{"type": "function", "function": _TOOL}])
            for arguments, sign in ((_CALL, _WORD), (json.dumps(_CALL), json.dumps(_CALL)))
            if sign in (text := self._try(_chat("assistant", "", arguments, tools)))
            and str(_CALL) not in text  # Python's form of a mapping is no JSON
        } or {str, dict}
        begun = self._try(_chat("user", _WORD), add_generation_prompt=True)
        self.cue = begun.rpartition(_WORD)[2].strip()
        """Text between a user's message and the answer."""
        tail = self.ids(self._try(_chat("assistant", _WORD)).rpartition(_WORD)[2])
        added = [each for each in tail if each in tokenizer.added_tokens_decoder]
        self.end_id = next((each for each in added if each in stops), added[0] if added else None)
        """Token that ends an assistant's turn; None if the template writes none."""
        self.end = tokenizer.decode([self.end_id]) if added else ""
        """Text of this token."""
        self._system = data.system_prompt

    def render(self, chat: Chat, **how: Any) -> str:
        """Return the text of a chat.

        Args:
            chat: The chat.
            **how: Other arguments of ``apply_chat_template``.

        Raises:
            RowError: The template refuses the chat.
        """
        return str(self._apply(chat, tokenize=False, **how))

    def ids(self, text: str, *, is_whole: bool = False) -> list[int]:
        """Return the tokens of a text, with the tokenizer's special tokens if it ``is_whole``.

        None of these is doubled.

        Raises:
            RowError: The text is not valid Unicode.
        """
        try:
            ids = list(self._tokenizer.encode(text, add_special_tokens=is_whole))
        except (TypeError, UnicodeError) as error:  # of lone surrogates
            raise unlike("a text", text, "valid Unicode") from error
        ids = ids[1:] if is_whole and ids[:2] == [self._tokenizer.bos_token_id] * 2 else ids
        return ids[:-1] if is_whole and ids[-2:] == [self._tokenizer.eos_token_id] * 2 else ids

    def last_part(self, chat: Chat) -> tuple[str, str]:
        """Return the text in front of a chat's last answer, and the text of the whole chat.

        Raises:
            RowError: The template refuses the chat, leaves out some of the answer or its reasoning,
                or the last message changes others.
        """
        before, last = chat.of(chat.messages[:-1]), chat.messages[-1]
        text, begin = self.render(chat), self.render(before, add_generation_prompt=True)
        shared = len(begin)
        if not text.startswith(begin):
            # The template may begin an answer otherwise than it writes one, but not what precedes.
            bare = self.render(before)
            shared = len(bare)
            if not (begin.startswith(bare) and text.startswith(bare)):
                raise RowError(
                    f"{chat.field}[{len(before.messages)}] changes how the chat template renders "
                    "the messages before it, expected a template that only appends"
                )
        # Words are taken in order: reasoning that the content repeats must be there twice.
        parts = dict.fromkeys(last[key] for key in (*_REASONING, "content") if key in last)
        given = "\n".join(part for part in parts if isinstance(part, str)).strip()
        turn = self.cue + text[shared:]
        words = iter(_WORDS.findall(turn))
        if given not in turn and not all(word in words for word in _WORDS.findall(given)):
            raise _left_out(f"a part of {chat.field}[{len(before.messages)}]")
        return begin, text

    def marked(self, chat: Chat) -> dict[str, list[int]] | None:
        """Return a sample by the template's marks of generated text; None if nothing is marked."""
        if not _MARKS.search(str(self._tokenizer.chat_template)):
            return None
        found = self._apply(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = found["input_ids"], found["assistant_masks"]
        return {"input_ids": ids, "loss_mask": mask} if any(mask) else None

    def require_all(self, chat: Chat, text: str, **how: Any) -> None:
        """Check that a text has all contents, tool calls and tools of its chat.

        It has one if a word in its place is rendered, beside words in all other places, or would
        at least change the text.

        Args:
            chat: The chat.
            text: Its rendering.
            **how: Other arguments of ``apply_chat_template``.

        Raises:
            RowError: The template leaves something out.
        """
        if chat.variables.get("tools"):
            without = Chat(chat.messages, {**chat.variables, "tools": None}, chat.field)
            if self._try(without, **how) == text:
                raise _left_out("'tools'")
        messages = self._whole(chat)
        first = len(messages) - len(chat.messages)
        words = [
            {name: f"{_WORD}x{at}x{number}q" for number, name in enumerate(_parts(message))}
            for at, message in enumerate(messages)
        ]
        seen = self._try(chat.of(list(map(_with_words, messages, words))), **how)
        for at, message in enumerate(messages):
            for name in (name for name, word in words[at].items() if word not in seen):
                other = _with_words(message, {name: words[at][name]})
                changed = chat.of([*messages[:at], other, *messages[at + 1 :]])
                if self._try(changed, **how) == text:
                    field = f"{chat.field}[{at - first}]{name}"
                    raise _left_out(field if at >= first else "data.system_prompt")

    def _try(self, chat: Chat, **how: Any) -> str:
        with contextlib.suppress(RowError):
            return self.render(chat, **how)
        return ""

    def _apply(self, chat: Chat, **how: Any) -> Any:
        try:
            messages = [self._form(message) for message in self._whole(chat)]
            variables = self._variables | chat.variables | how
            return self._tokenizer.apply_chat_template(messages, **variables)
        except Exception as error:  # templates may raise any exception
            raise RowError(
                f"{chat.field} is refused by the chat template ({type(error).__name__}: {error}), "
                "expected a chat that it renders"
            ) from error

    def _whole(self, chat: Chat) -> Messages:
        """Return the messages of a chat after the system prompt, if it has none of its own."""
        has_own = bool(chat.messages) and chat.messages[0]["role"] in ("system", "developer")
        if has_own or not self._system:
            return chat.messages
        return [{"role": "system", "content": self._system}, *chat.messages]

    def _form(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in the form that the template takes."""
        role, content = message["role"], message["content"]
        if role == "assistant" and self.end and content.rstrip().endswith(self.end):
            content = content.rstrip().removesuffix(self.end)  # the template writes it
        made = {**message, "role": self._roles.get(role, role), "content": content}
        if (role == "assistant") in self._has_parts:
            made["content"] = [{"type": "text", "text": content}]
        if "tool_calls" in message:
            made["tool_calls"] = [self._form_of_call(each) for each in message["tool_calls"]]
        return made

    def _form_of_call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call.get("function", call).get("arguments")
        if type(arguments) in self._takes or not isinstance(arguments, str | dict):
            return call
        made = json.loads(arguments) if isinstance(arguments, str) else json.dumps(arguments)
        return _with_arguments(call, made)
