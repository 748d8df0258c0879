"""Renders chats with a model's chat template, and encodes only the text after the last turn."""

from __future__ import annotations

import bisect
import functools
import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from helmsman.agents._formats import ModelFormat
from helmsman.agents._messages import BadRequestError, Message

_SECRET = secrets.token_hex(8)
_CONTENT, _REASONING = f"content-{_SECRET}-{{}}.", f"reasoning-{_SECRET}-{{}}."
"""Replace the model's own text in a rendering, so that its place is found whatever it says."""


class Sampled(NamedTuple):
    """A turn of the model in a chat: the message, and its tokens."""

    message: Message
    token_ids: Sequence[int]
    """Sampled tokens, with the end token."""
    stop_text: str
    """Text of the end token; '' if the turn was cut off."""
    reasoning: Sequence[int]
    """The tokens of the reasoning."""
    body: Sequence[int]
    """The tokens of content and tool calls, without the end token."""


class Rendered(NamedTuple):
    """The rendering of a prompt, with which later renderings are compared."""

    length: int
    digest: bytes
    end: str
    """Its last characters."""

    @classmethod
    def of(cls, text: str) -> Rendered:
        """Describe a text."""
        return cls(len(text), _digest(text), text[-40:])

    def is_prefix_of(self, text: str) -> bool:
        """Return whether a later rendering begins with this one."""
        return len(text) >= self.length and _digest(text[: self.length]) == self.digest


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Suffix(NamedTuple):
    """The text that follows a turn of the model, or the reason why there is none."""

    text: str = ""
    rewrite: str = ""
    """Change of earlier text by the template; '' if it only appends."""


class ChatTemplate:
    """Renders and encodes the chats of one model.

    Raises:
        ValueError: The tokenizer has no chat template, or the family is unknown.
    """

    def __init__(
        self, tokenizer: Any, family: str | None = None, stop_token_ids: Sequence[int] = ()
    ) -> None:
        text = tokenizer.chat_template
        if isinstance(text, dict):
            text = text.get("tool_use") or text.get("default")
        if not text:
            raise ValueError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; "
                "expected one, since agents send chats. Set tokenizer.chat_template, or "
                "data.chat_template in a recipe"
            )
        self._tokenizer, self._text = tokenizer, text
        self.format = ModelFormat(text, family)
        self._text_arguments = self._needs_text_arguments()
        self.stop_ids = self._find_stop_ids(stop_token_ids)
        """Tokens that end a turn of the model."""
        self._stop_texts = {id_: self.decode([id_]) for id_ in self.stop_ids}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
        *,
        generation: bool = True,
    ) -> str:
        """Return the text of a chat.

        Raises:
            BadRequestError: The template rejects the chat.
        """
        chat = [each.for_template(text_arguments=self._text_arguments) for each in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    chat,
                    tools=list(tools) or None,
                    chat_template=self._text,
                    tokenize=False,
                    add_generation_prompt=generation,
                    **(template_args or {}),
                )
            )
        except Exception as error:  # templates raise any exception
            raise BadRequestError(
                f"the model's chat template rejects this chat: {type(error).__name__}: {error}",
                "messages",
            ) from error

    @functools.cached_property
    def shows_tools(self) -> bool:
        """Whether tools are part of the text of a chat."""
        tool = {"type": "function", "function": {"name": _SECRET, "parameters": {}}}
        try:
            return _SECRET in self.render([Message(role="user", content="x")], [tool])
        except BadRequestError:
            return True  # such as a template that needs more of a tool

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered text."""
        text = text.encode(errors="replace").decode()  # agents may send lone surrogates
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def encode_after(self, stop_text: str, text: str) -> list[int]:
        """Return the tokens of a text that follows an end token, as they are in the whole chat."""
        if not stop_text:
            return self.encode(text)
        before, both = self.encode(stop_text), self.encode(stop_text + text)
        return both[len(before) :] if both[: len(before)] == before else self.encode(text)

    def stop_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of the end token of a turn; '' if it was cut off."""
        return self._stop_texts.get(token_ids[-1], "") if token_ids else ""

    def split(self, token_ids: Sequence[int], at: int) -> int:
        """Return the number of tokens that make at least the first ``at`` characters."""
        text, nums = self.decode(token_ids)[:at], range(len(token_ids) + 1)
        low = bisect.bisect_left(nums, len(text), key=lambda num: len(self.decode(token_ids[:num])))
        # The first bytes of a character already decode to one, U+FFFD.
        return next(num for num in nums[low:] if self.decode(token_ids[:num]).startswith(text))

    def suffix(
        self,
        before: Sequence[Message],
        turn: Sampled,
        after: Sequence[Message],
        prompt: Rendered,
        tools: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any],
    ) -> Suffix:
        """Return the text between the model's turn and its next one.

        The turn's own text plays no part: a marker stands for it. So it does not matter that a
        template would write the same tool call differently from the model.
        """
        marked = _marked(turn.message, 0, with_content=bool(turn.message.content))
        text = self.render([*before, marked, *after], tools, template_args)
        if not prompt.is_prefix_of(text):
            return Suffix(rewrite="the template changes the messages before an earlier answer")
        end, length = self._end_of_turn(text, prompt.length, turn.stop_text)
        own = text[prompt.length : end]
        message = turn.message
        if end < 0:
            token = f"the end token {turn.stop_text!r}" if turn.stop_text else "an end token"
            return Suffix(rewrite=f"the template leaves out {token} of an earlier answer")
        if message.reasoning and _REASONING.format(0) not in own:
            return Suffix(rewrite="the template drops the reasoning of an earlier answer")
        if message.content and _CONTENT.format(0) not in own:
            return Suffix(rewrite="the template drops the text beside tool calls")
        return Suffix(text=text[end + length :])

    def rewritten(
        self,
        messages: Sequence[Message],
        turns: Mapping[int, Sampled],
        tools: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any],
    ) -> list[int]:
        """Return the tokens of a chat whose history the template rewrites.

        The model's own text consists of the tokens that it sampled; the rest is encoded.
        """
        chat = [
            _marked(turns[index].message, index, with_content=True) if index in turns else message
            for index, message in enumerate(messages)
        ]
        try:
            text = self.render(chat, tools, template_args)
        except BadRequestError:
            text = ""  # some templates reject text beside tool calls
        has_place = all(_CONTENT.format(i) in text or not turns[i].body for i in turns)
        if self.format.family == "gptoss" or not has_place:
            # These calls are written by the template: there is no place for the model's own form.
            chat = [
                messages[i] if i in turns and turns[i].message.tool_calls else each
                for i, each in enumerate(chat)
            ]
            text = self.render(chat, tools, template_args)
        ids: list[int] = []
        position = 0
        for index in sorted(turns):
            turn, content = turns[index], _CONTENT.format(index)
            for marker, tokens in (
                (_REASONING.format(index), turn.reasoning),
                (content, turn.body),
            ):
                place = text.find(marker, position)
                if place >= 0:
                    ids += self.encode(text[position:place]) + list(tokens)
                    position = place + len(marker)
                    if marker == content and turn.message.tool_calls:
                        end = self._end_of_turn(text, position, turn.stop_text)[0]
                        position = max(position, end)
        return ids + self.encode(text[position:])

    def _end_of_turn(self, text: str, start: int, stop_text: str) -> tuple[int, int]:
        """Return where a turn ends in a rendering, and the length of its end token's text.

        A turn that was cut off ends before the token with which the template closes it, whose
        length then counts as 0. The place is -1 if there is no end.
        """
        if stop_text:
            return text.find(stop_text, start), len(stop_text)
        places = [text.find(each, start) for each in self._stop_texts.values()]
        return min((place for place in places if place >= 0), default=-1), 0

    def own_turn(
        self, before: Sequence[Message], message: Message, tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the tokens of a model's turn as the template itself writes it.

        Raises:
            BadRequestError: The template rejects the chat.
        """
        start = self.render(before, tools)
        text = self.render([*before, message], tools, generation=False)
        pairs = enumerate(zip(start, text, strict=False))
        shared = next((place for place, (a, b) in pairs if a != b), min(len(start), len(text)))
        own = text[shared:]
        if (closing := self.format.closing(start)) and closing not in own:
            own = f"{closing}\n\n{own}"
        end, length = min(
            ((own.find(each), len(each)) for each in self._stop_texts.values() if each in own),
            default=(len(own), 0),
        )
        return self.encode(own[: end + length])

    def _needs_text_arguments(self) -> bool:
        """Whether the template joins the arguments of a call to a text, as DeepSeek's does."""
        return bool(re.search(r"\+\s*tool\w*\[.function.\]\[.arguments.\]", self._text))

    def _find_stop_ids(self, more: Sequence[int]) -> tuple[int, ...]:
        found = {*more, self._tokenizer.eos_token_id} - {None}
        answer = Message(role="assistant", content=_CONTENT.format(0))
        chat = [Message(role="user", content="x"), answer]
        try:
            text = self.render(chat, generation=False)
        except BadRequestError:
            text = ""
        place = text.find(_CONTENT.format(0))
        if place >= 0:
            closing = self.encode(text[place + len(_CONTENT.format(0)) :].lstrip())
            special = set(self._tokenizer.all_special_ids) | set(
                self._tokenizer.added_tokens_decoder
            )
            found |= set(closing[:1]) & special
        for word in _MORE_STOPS.get(self.format.family, ()):
            id_ = self._tokenizer.convert_tokens_to_ids(word)
            if id_ is not None and id_ != self._tokenizer.unk_token_id:
                found.add(id_)
        return tuple(sorted(found))


_MORE_STOPS = {
    "gptoss": ("<|call|>", "<|return|>"),
    "glm": ("<|observation|>", "<|user|>", "<|endoftext|>"),
    "llama": ("<|eom_id|>",),
}
"""Tokens by which models of a family end turns that call tools."""


def _marked(message: Message, index: int, *, with_content: bool) -> Message:
    """Replace the model's own text by markers; arguments of calls become empty."""
    return Message(
        role="assistant",
        content=_CONTENT.format(index) if with_content else "",
        reasoning=_REASONING.format(index) if message.reasoning else "",
        tool_calls=tuple(type(call)(call.id, call.name, "{}") for call in message.tool_calls),
    )
