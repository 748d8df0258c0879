"""Tokens of texts and chats, by the tokenizer and the chat template of a local model folder."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.api.extras import needed_by
from helmsman.recipes.messages import Chat, Messages, is_token_ids, messages_of, require_named
from helmsman.recipes.rows import RowError, unlike
from helmsman.recipes.settings import Data

Sample = dict[str, list[int]]
"""``input_ids`` and ``loss_mask``."""

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


class FolderTokenizer:
    """The tokenizer of a local Hugging Face folder; applies its chat template, if it has one.

    Args:
        folder: The folder.
        needs_end: Whether a tokenizer without an end token is refused.

    Raises:
        ValueError: There is no such folder, or its tokenizer is unusable.
        BackendNotInstalledError: transformers is missing.
    """

    def __init__(self, folder: str, *, needs_end: bool = True) -> None:
        with needed_by("the tokenizer of a model folder", "transformers"):
            from transformers import AutoTokenizer

        if not os.path.isdir(folder):
            raise ValueError(
                f"there is no model folder {folder!r}; give a local one in the Hugging Face layout"
            )
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            """The Hugging Face tokenizer."""
        except Exception as exc:  # transformers may raise any exception, without naming the folder
            reason = " ".join(str(exc).split())[:300] or type(exc).__name__
            raise ValueError(
                f"{folder!r} has no readable tokenizer in the Hugging Face layout: {reason}"
            ) from exc
        if self.tokenizer.eos_token_id is None and needs_end:
            raise ValueError(
                f"the tokenizer in {folder!r} has no end token (eos_token), which answers need"
            )
        self.eos_id = -1 if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, in the chat template if there is one."""
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            how = {"add_generation_prompt": True, "return_dict": False}
            return list(self.tokenizer.apply_chat_template(chat, **how))
        return list(self.tokenizer.encode(text))

    def encode_answer(self, text: str) -> list[int]:
        """Return the tokens of an answer and the end token."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write the tokenizer into a folder."""
        self.tokenizer.save_pretrained(str(folder))


class ChatTokenizer(FolderTokenizer):
    """The tokenizer of a local Hugging Face folder, for texts and chats.

    Args:
        folder: Folder of the model.
        data: Settings with the template, its variables and the system prompt.
        needs_end: Whether a tokenizer without an end token is refused.

    Raises:
        ValueError: Tokenizer, template or generation_config.json is invalid.
        OSError: A file cannot be read.
    """

    def __init__(self, folder: str, data: Data, *, needs_end: bool = True) -> None:
        super().__init__(folder, needs_end=needs_end)
        if data.chat_template is not None:
            try:
                self.tokenizer.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"data.chat_template, {data.chat_template}, is not UTF-8 text: {error}"
                ) from error
        self._field = repr(data.prompt_key)
        num_embedded, self.max_positions = model_limits(folder)
        self._num_tokens = min(len(self.tokenizer), num_embedded)
        stops = {each for each in (self.eos_id, *_end_tokens(Path(folder))) if each >= 0}
        self._learn_template(data, stops)
        self.stop_ids = tuple(sorted(stops | {each for each in [self.end_id] if each is not None}))
        """Stop tokens: of the tokenizer, of generation_config.json and of the chat template."""

    def _learn_template(self, data: Data, stops: set[int]) -> None:
        """Find the forms of messages that the template takes, and the texts around an answer."""
        self._variables = dict(data.template_args)
        self._system: str | None = None
        self._has_template = bool(self.tokenizer.chat_template)
        if not self._has_template:
            has_start = self.tokenizer.encode("a")[0] == self.tokenizer.bos_token_id
            start = self.tokenizer.bos_token if has_start else ""
            self._variables |= {"chat_template": _PARAGRAPHS, "start": start}
        self._roles: dict[str, str] = {}
        self._has_parts, self._takes, self._end = set[bool](), {str, dict}, ""
        for role in ("user", "assistant"):
            text = self._show(role)
            if _WORD not in text and (text or self._has_parts):
                self._has_parts.add(role == "assistant")
        if _WORD not in self._show("developer"):
            self._roles = {"developer": "system"}
        self._takes = {
            type(arguments)
            for tools in (None, [{"type": "function", "function": _TOOL}])
            for arguments, sign in ((_CALL, _WORD), (json.dumps(_CALL), json.dumps(_CALL)))
            if sign in (text := self._show("assistant", arguments, tools=tools))
            and str(_CALL) not in text  # Python's form of a mapping is no JSON
        } or {str, dict}
        self._cue = self._show("user", add_generation_prompt=True).rpartition(_WORD)[2].strip()
        tail = self._ids(self._show("assistant").rpartition(_WORD)[2])
        added = [each for each in tail if each in self.tokenizer.added_tokens_decoder]
        self.end_id = next(iter([each for each in added if each in stops] or added), None)
        """Token that ends an answer; None if the chat template writes none."""
        self._end = self.tokenizer.decode([self.end_id]) if added else ""
        self._system = data.system_prompt

    def encode(self, prompt: Any, variables: dict[str, Any] | None = None) -> tuple[str, list[int]]:
        """Return text and tokens of a prompt; token ids are passed on unchanged.

        A text becomes a user's message. It is passed on as it is after the system prompt if there
        is no chat template, and alone if it ends as the template begins an answer. A chat that ends
        with the assistant's message is continued.

        Args:
            prompt: A text, a message, messages or token ids.
            variables: Variables of the template.

        Raises:
            RowError: The prompt has another form, or the template refuses it.
        """
        if (written := self._written(prompt, variables or {})) is not None:
            return written
        messages = self._asked(prompt)
        chat = Chat(messages, variables or {}, self._field)
        is_begun = messages[-1]["role"] == "assistant"
        how = {"add_generation_prompt": not is_begun, "continue_final_message": is_begun}
        text = self._render(chat, **how)
        self._require_all(chat, text, **how)
        return text, self._ids(text)

    def encode_chat(self, prompt: Any, answer: str) -> list[int]:
        """Return the tokens of a chat with its answer, as reward models read them.

        Args:
            prompt: A text, a message or messages.
            answer: The text that follows, or that continues the assistant's last message.

        Raises:
            RowError: The prompt has another form, or the template refuses the chat, or leaves
                something out.
        """
        messages = messages_of(prompt, self._field, "user")
        if messages[-1]["role"] == "assistant":
            answer = messages.pop()["content"] + answer
        turn = {"role": "assistant", "content": answer}
        chat = Chat([*messages, turn], {}, self._field)
        text = self._render(chat)
        self._require_all(chat, text)
        return self._ids(text)

    def answer(
        self, prompt: Any, field: str, answer: Any, variables: dict[str, Any]
    ) -> list[Sample]:
        """Return samples that train on the assistant's turns of an answer to a prompt.

        Args:
            prompt: A text, a message, messages or token ids.
            field: Field of the answer in the row, for the messages of errors.
            answer: A text, a message or messages.
            variables: Variables of the template.

        Raises:
            RowError: Prompt or answer has another form, or the template refuses them.
        """
        if isinstance(answer, str) and (written := self._written(prompt, variables)) is not None:
            text, begin = written
            if isinstance(prompt, str):
                return [self.continuation(text, answer, variables)]
            after = [*self._ids(answer), *([] if self.end_id is None else [self.end_id])]
            mask = [0] * len(begin) + [1] * len(after)
            return [{"input_ids": begin + after, "loss_mask": mask}]
        before = self._asked(prompt)
        turns = messages_of(answer, field, "assistant")
        turns = turns[len(before) :] if turns[: len(before)] == before else turns
        if not turns or turns[0]["role"] != "assistant":
            raise unlike(field, answer, "the assistant's answer")
        return self.turns(Chat(before + turns, variables, f"{self._field} + {field}"), len(before))

    def continuation(self, text: str, answer: str, variables: dict[str, Any]) -> Sample:
        """Return a sample that trains on the continuation of a text, without a template."""
        require_named(variables, text)
        eos, whole = self.tokenizer.eos_token, text + answer
        end = (self._end or eos) if self._is_begun(text) else eos
        whole += "" if whole.rstrip().endswith((end, eos)) else end
        return self._sample(whole, [(text, whole)], is_whole=True)

    def turns(self, chat: Chat, first: int = 0) -> list[Sample]:
        """Return samples that train on the assistant's turns from a message on.

        There is one sample, unless the template renders a turn otherwise when others follow it,
        such as without its reasoning: then each turn has a sample that ends with it.

        Args:
            chat: The chat.
            first: Index of the first message that is not only context.

        Raises:
            RowError: There is no such turn, or the template refuses the chat.
        """
        whole = self._render(chat)
        self._require_all(chat, whole)
        answers = [i for i, each in enumerate(chat.messages) if each["role"] == "assistant"]
        turns = [i for i in answers if i >= first and chat.messages[i].get("weight", 1)]
        if not turns:
            raise RowError(f"{chat.field} has no turn of the assistant, expected one to train on")
        parts = [self._last_part(chat.of(chat.messages[: i + 1])) for i in turns]
        if not all(whole.startswith(end) for _, end in parts):
            return [self._sample(part[1], [part]) for part in parts]
        if not first and turns == answers and _MARKS.search(str(self.tokenizer.chat_template)):
            made = self._apply(chat, return_dict=True, return_assistant_tokens_mask=True)
            if any(made["assistant_masks"]):
                return [{"input_ids": made["input_ids"], "loss_mask": made["assistant_masks"]}]
        return [self._sample(whole, parts)]

    def known(self, ids: list[int], field: str) -> list[int]:
        """Return token ids, which tokenizer and model must have."""
        if (largest := max(ids, default=0)) >= self._num_tokens:
            expected = f"expected less than {self._num_tokens}"
            raise RowError(f"{field} has the token {largest}, {expected}")
        return ids

    def limit(self, data: Data, key: str) -> tuple[int, str]:
        """Return the number of tokens that a row may have, and the name of this limit."""
        own = (self.max_positions, "the model's context length")
        return min((getattr(data, key), f"data.{key}"), own)

    def _ids(self, text: str, *, is_whole: bool = False) -> list[int]:
        """Return the tokens of a text, with the tokenizer's special tokens if it ``is_whole``.

        None of these is doubled.
        """
        try:
            ids = list(self.tokenizer.encode(text, add_special_tokens=is_whole))
        except (TypeError, UnicodeError) as error:  # of lone surrogates
            raise unlike("a text", text, "valid Unicode") from error
        ids = ids[1:] if is_whole and ids[:2] == [self.tokenizer.bos_token_id] * 2 else ids
        return ids[:-1] if is_whole and ids[-2:] == [self.eos_id] * 2 else ids

    def _sample(
        self, text: str, parts: Iterable[tuple[str, str]], *, is_whole: bool = False
    ) -> Sample:
        """Return a sample that trains on parts of a text.

        Args:
            text: The text.
            parts: For each part, the text in front of it, and the text up to its end.
            is_whole: Whether the tokenizer adds its special tokens.
        """
        encode = functools.partial(self._ids, is_whole=is_whole)
        ids = encode(text)
        mask = [0] * len(ids)
        for begin, end in parts:
            start = common(encode(begin), ids) if begin else 0
            stop = len(ids) if end == text else common(encode(end), ids)
            mask[start:stop] = [1] * (stop - start)
        return {"input_ids": ids, "loss_mask": mask}

    def _written(self, prompt: Any, variables: dict[str, Any]) -> tuple[str, list[int]] | None:
        """Return text and tokens of a prompt around which no template is put."""
        bare = not self._has_template
        if is_token_ids(prompt):
            text, ids = str(self.tokenizer.decode(self.known(prompt, self._field))), prompt
        elif isinstance(prompt, str) and prompt and (bare or self._is_begun(prompt)):
            text = prompt if self._system is None or not bare else f"{self._system}\n\n{prompt}"
            ids = self._ids(text, is_whole=True)
        else:
            return None
        require_named(variables, text)
        return text, ids

    def _asked(self, prompt: Any) -> Messages:
        """Return the messages of a prompt, around which no template was put."""
        messages = messages_of(prompt, self._field, "user")
        last = messages[-1]
        if last["role"] == "user" and self._has_template and self._is_begun(last["content"]):
            field, expected = f"the end of {self._field}", "none that begins an answer"
            raise unlike(field, last["content"][-80:], f"{expected}: the template does")
        return messages

    def _is_begun(self, text: str) -> bool:
        """Return whether a text ends as the template begins an answer."""
        return bool(self._cue) and text.rstrip().endswith(self._cue)

    # --- the template -----------------------------------------------------------------------------

    def _last_part(self, chat: Chat) -> tuple[str, str]:
        """Return the text in front of a chat's last answer, and the text of the whole chat.

        Raises:
            RowError: The template refuses the chat, leaves out some of the answer or its reasoning,
                or the last message changes others.
        """
        before, last = chat.of(chat.messages[:-1]), chat.messages[-1]
        text, begin = self._render(chat), self._render(before, add_generation_prompt=True)
        field = f"{chat.field}[{len(before.messages)}]"
        # The template may begin an answer otherwise than it writes one, but not what precedes.
        bare = begin if text.startswith(begin) else self._render(before)
        if not (begin.startswith(bare) and text.startswith(bare)):
            raise RowError(
                f"{field} changes how the chat template renders the messages before it, expected a "
                "template that only appends"
            )
        # Words are taken in order: reasoning that the content repeats must be there twice.
        given = [last[key] for key in (*_REASONING, "content") if isinstance(last.get(key), str)]
        answer, turn = "\n".join(dict.fromkeys(given)).strip(), self._cue + text[len(bare) :]
        words = iter(_WORDS.findall(turn))
        if answer not in turn and not all(word in words for word in _WORDS.findall(answer)):
            raise _left_out(f"a part of {field}")
        return begin, text

    def _require_all(self, chat: Chat, text: str, **how: Any) -> None:
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
        if chat.variables.get("tools") and self._try(chat, **how, tools=None) == text:
            raise _left_out("'tools'")
        messages = self._whole(chat)
        places = [(at, part) for at, each in enumerate(messages) for part in _parts(each)]
        words = {place: f"{_WORD}x{number}q" for number, place in enumerate(places)}
        seen = self._try(chat.of(_with_words(messages, words)), **how)
        for (at, part), word in words.items():
            one = {(at, part): word}
            if word not in seen and self._try(chat.of(_with_words(messages, one)), **how) == text:
                index = at - (len(messages) - len(chat.messages))
                name = ".content" if part is None else f".tool_calls[{part}]"
                raise _left_out(
                    f"{chat.field}[{index}]{name}" if index >= 0 else "data.system_prompt"
                )

    def _show(self, role: str, arguments: Any = None, **how: Any) -> str:
        """Return the text of a short chat with a message of this role, or with a tool call."""
        message: dict[str, Any] = {"role": role, "content": _WORD if arguments is None else ""}
        if arguments is not None:
            function = {"name": "f", "arguments": arguments}
            message["tool_calls"] = [{"type": "function", "id": "call00000", "function": function}]
        user = {"role": "user", "content": "hi"}
        chats = {"user": [message], "developer": [message, user], "assistant": [user, message]}
        return self._try(Chat(chats[role], {}, ""), **how)

    def _try(self, chat: Chat, **how: Any) -> str:
        with contextlib.suppress(RowError):
            return self._render(chat, **how)
        return ""

    def _render(self, chat: Chat, **how: Any) -> str:
        return str(self._apply(chat, tokenize=False, **how))

    def _apply(self, chat: Chat, **how: Any) -> Any:
        try:
            messages = [self._form(message) for message in self._whole(chat)]
            variables = self._variables | chat.variables | how
            return self.tokenizer.apply_chat_template(messages, **variables)
        except Exception as error:  # templates may raise any exception
            raise RowError(
                f"{chat.field} is refused by the chat template ({type(error).__name__}: {error}), "
                "expected a chat that it renders"
            ) from error

    def _whole(self, chat: Chat) -> Messages:
        """Return the messages of a chat after the system prompt, if it has none of its own."""
        has_own = chat.messages[:1] and chat.messages[0]["role"] in ("system", "developer")
        if has_own or not self._system:
            return chat.messages
        return [{"role": "system", "content": self._system}, *chat.messages]

    def _form(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in the form that the template takes."""
        role, content = message["role"], message["content"]
        if role == "assistant" and self._end and content.rstrip().endswith(self._end):
            content = content.rstrip().removesuffix(self._end)  # the template writes it
        made = {**message, "role": self._roles.get(role, role), "content": content}
        if (role == "assistant") in self._has_parts:
            made["content"] = [{"type": "text", "text": content}]
        if "tool_calls" in message:
            made["tool_calls"] = copy.deepcopy(message["tool_calls"])
        for function in (call["function"] for call in made.get("tool_calls", ())):
            arguments = function.get("arguments")
            if arguments is not None and type(arguments) not in self._takes:
                change = json.loads if isinstance(arguments, str) else json.dumps
                function["arguments"] = change(arguments)
        return made


def _parts(message: dict[str, Any]) -> list[int | None]:
    """Return the parts of a message that are to be rendered: None for its content, then calls."""
    calls = range(len(message.get("tool_calls", ())))
    return [None, *calls] if message["content"].strip() else [*calls]


def _with_words(messages: Messages, words: dict[tuple[int, int | None], str]) -> Messages:
    """Return messages with words in place of some parts, by message and part."""
    made = copy.deepcopy(messages)
    for (at, part), word in words.items():
        if part is None:
            made[at]["content"] = word
        else:
            made[at]["tool_calls"][part]["function"]["arguments"] = {word: 1}
    return made


def _left_out(field: str) -> RowError:
    expected = "expected one that renders it (data.chat_template)"
    return RowError(f"{field} is left out by the chat template, {expected}")


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of first items that two sequences share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _end_tokens(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    try:
        content = path.read_bytes() if path.exists() else b"{}"
        ids = msgspec.json.decode(content, type=_Generation).eos_token_id
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    return [ids] if isinstance(ids, int) else ids or []


def model_limits(folder: str) -> tuple[int, int]:
    """Return the numbers of tokens and of positions that a model has; unlimited if unknown."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (OSError, ValueError):  # without a model, or of one that the engines refuse by name
        return sys.maxsize, sys.maxsize
    positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = (rope.get("original_max_position_embeddings") or positions) * (rope.get("factor") or 1)
    return getattr(config, "vocab_size", sys.maxsize), max(positions, int(scaled))
