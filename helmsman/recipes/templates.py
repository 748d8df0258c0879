"""Chat templates: the forms of messages that they take, and what they make of chats."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from typing import Any

from helmsman.recipes.messages import Chat
from helmsman.recipes.rows import RowError, unlike
from helmsman.recipes.settings import Data

_WORD, _CALL = "Zq7", {"Zq7": 1}
"""Content, and arguments of a call, in the chats that show how a template renders."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PARAGRAPHS = (
    "{{ start }}{% for m in messages %}{{ '\n\n' if not loop.first }}{{ m.role | capitalize }}:"
    "{{ m.content + eos_token if m.role == 'assistant' else ' ' + m.content }}{% endfor %}"
    "{{ '\n\nAssistant:' if add_generation_prompt }}"
)
"""Template for models without one: a form that models trained on plain text can continue."""


def _chat(role: str, content: str, arguments: Any = None) -> Chat:
    """Return a short chat with a message of this role, perhaps with a tool call."""
    message: dict[str, Any] = {"role": role, "content": content}
    if arguments is not None:
        function = {"name": "f", "arguments": arguments}
        message["tool_calls"] = [{"type": "function", "id": "call00000", "function": function}]
    user = {"role": "user", "content": "hi"}
    chats = {"user": [message], "developer": [message, user], "assistant": [user, message]}
    return Chat(chats[role], {}, "chat")


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
        self._has_parts, self._takes, self.end = False, {str, dict}, ""
        text = self._try(_chat("user", _WORD))
        self._has_parts = bool(text) and _WORD not in text
        has_developer = _WORD in self._try(_chat("developer", _WORD))
        self._roles = {} if has_developer else {"developer": "system"}
        self._takes = {
            type(arguments)
            for arguments, sign in ((_CALL, _WORD), (json.dumps(_CALL), json.dumps(_CALL)))
            if sign in self._try(_chat("assistant", "", arguments))
        }
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
            RowError: The template refuses the chat, or the last message changes others.
        """
        before = chat.of(chat.messages[:-1])
        text, begin = self.render(chat), self.render(before, add_generation_prompt=True)
        if not text.startswith(begin):
            # The template may begin an answer otherwise than it writes one, but not what precedes.
            bare = self.render(before)
            if not (begin.startswith(bare) and text.startswith(bare)):
                raise RowError(
                    f"{chat.field}[{len(before.messages)}] changes how the chat template renders "
                    "the messages before it, expected a template that only appends"
                )
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

        Args:
            chat: The chat.
            text: Its rendering.
            **how: Other arguments of ``apply_chat_template``.

        Raises:
            RowError: The template leaves something out.
        """
        others: dict[str, Chat] = {}
        for at, message in enumerate(chat.messages):
            for key, other in (("content", _WORD), ("tool_calls", [])):
                if str(message.get(key, "")).strip() not in text:
                    changed = [
                        *chat.messages[:at],
                        {**message, key: other},
                        *chat.messages[at + 1 :],
                    ]
                    others[f"{chat.field}[{at}].{key}"] = chat.of(changed)
        if chat.variables.get("tools"):
            others["'tools'"] = Chat(chat.messages, {**chat.variables, "tools": None}, chat.field)
        for field, without in others.items():
            if self._try(without, **how) == text:
                raise RowError(
                    f"{field} is left out by the chat template, expected one that renders it "
                    "(data.chat_template)"
                )

    def _try(self, chat: Chat, **how: Any) -> str:
        with contextlib.suppress(RowError):
            return self.render(chat, **how)
        return ""

    def _apply(self, chat: Chat, **how: Any) -> Any:
        try:
            messages = [self._form(message) for message in chat.messages]
            if self._system and not (messages and messages[0]["role"] in ("system", "developer")):
                messages.insert(0, self._form({"role": "system", "content": self._system}))
            variables = self._variables | chat.variables | how
            return self._tokenizer.apply_chat_template(messages, **variables)
        except Exception as error:  # templates may raise any exception
            raise RowError(
                f"{chat.field} is refused by the chat template ({type(error).__name__}: {error}), "
                "expected a chat that it renders"
            ) from error

    def _form(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in the form that the template takes."""
        role, content = message["role"], message["content"]
        if role == "assistant" and self.end and content.rstrip().endswith(self.end):
            content = content.rstrip().removesuffix(self.end)  # the template writes it
        made = {**message, "role": self._roles.get(role, role), "content": content}
        if self._has_parts:
            made["content"] = [{"type": "text", "text": content}]
        if "tool_calls" in message:
            made["tool_calls"] = [self._form_of_call(each) for each in message["tool_calls"]]
        return made

    def _form_of_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if type(arguments) in self._takes or not isinstance(arguments, str | dict):
            return call
        made = json.loads(arguments) if isinstance(arguments, str) else json.dumps(arguments)
        return {**call, "function": {**function, "arguments": made}}
