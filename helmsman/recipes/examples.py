"""Training samples from rows with answers: supervised examples and preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helmsman.recipes.prompts import ChatTokenizer, Row, is_token_ids
from helmsman.recipes.settings import Data

Encode = Callable[[str, str, dict[str, Any]], Row]
"""Makes a row from (source, place, entry); raises ValueError that names the place."""


def supervised(data: Data, tokenizer: ChatTokenizer) -> Encode:
    """Return the encoder of supervised examples.

    A row has ``input_ids`` (and optionally ``loss_mask``), ``messages`` that end with the answer,
    ``text``, or a prompt with an answer (or ``completion``). Prompts are not trained on.
    """

    def encode(source: str, place: str, entry: dict[str, Any]) -> Row:
        entry = _named(entry, data)
        if "input_ids" in entry:
            ids = entry["input_ids"]
            if not is_token_ids(ids):
                raise ValueError(f"{place}: 'input_ids' is {ids!r:.80}; expected token ids")
            mask = entry.get("loss_mask", [1] * len(ids))
            sample = {"input_ids": list(ids), "loss_mask": list(mask)}
        elif "messages" in entry:
            *prompt, last = _chat(place, entry["messages"])
            sample = (
                tokenizer.sample(prompt, str(last["content"]))
                if prompt
                else _plain(tokenizer, str(last["content"]))
            )
        elif "text" in entry:
            sample = _plain(tokenizer, str(entry["text"]))
        else:
            answer = entry.get(data.answer_key, entry.get("completion"))
            if entry.get(data.prompt_key) is None or answer is None:
                raise ValueError(
                    f"{place} has {', '.join(map(repr, entry)) or 'no keys'}; expected "
                    f"'input_ids', 'messages', 'text', or "
                    f"{data.prompt_key!r} with {data.answer_key!r}"
                )
            sample = tokenizer.sample(entry[data.prompt_key], _answer_text(answer))
        return _row(source, entry, data, tokenizer, [sample])

    return encode


def preferences(data: Data, tokenizer: ChatTokenizer) -> Encode:
    """Return the encoder of preference pairs.

    A row has a prompt, and ``chosen`` and ``rejected``, each a text or a chat. Without a prompt,
    they are chats that share all messages but the last.
    """

    def encode(source: str, place: str, entry: dict[str, Any]) -> Row:
        missing = [name for name in ("chosen", "rejected") if entry.get(name) is None]
        if missing:
            raise ValueError(
                f"{place} has no {missing[0]!r}; expected a prompt with 'chosen' and 'rejected'"
            )
        samples = []
        for name in ("chosen", "rejected"):
            prompt, answer = entry.get(data.prompt_key), entry[name]
            if prompt is None:
                *prompt, last = _chat(place, answer)
                answer = last["content"]
            samples.append(tokenizer.sample(prompt, _answer_text(answer)))
        return _row(source, entry, data, tokenizer, samples)

    return encode


def _named(entry: dict[str, Any], data: Data) -> dict[str, Any]:
    """Rename the key of a row with only a prompt to ``text``, ``messages`` or ``input_ids``."""
    if entry.keys() != {data.prompt_key}:
        return entry
    value = entry[data.prompt_key]
    return {
        "text"
        if isinstance(value, str)
        else "input_ids"
        if is_token_ids(value)
        else "messages": value
    }


def _plain(tokenizer: ChatTokenizer, text: str) -> dict[str, list[int]]:
    ids = [*tokenizer.encode_text(text), tokenizer.eos_id]
    return {"input_ids": ids, "loss_mask": [1] * len(ids)}


def _chat(place: str, messages: Any) -> Sequence[Mapping[str, Any]]:
    is_chat = isinstance(messages, list) and bool(messages)
    if not is_chat or not all(
        isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in messages
    ):
        raise ValueError(
            f"{place}: {messages!r:.80} is not a chat; expected a list of {{role, content}}"
        )
    found: Sequence[Mapping[str, Any]] = messages
    return found


def _answer_text(answer: Any) -> str:
    """Return the text of an answer, or of a chat's last message."""
    return str(answer[-1]["content"]) if isinstance(answer, list) and answer else str(answer)


def _row(
    source: str,
    entry: dict[str, Any],
    data: Data,
    tokenizer: ChatTokenizer,
    samples: list[dict[str, list[int]]],
) -> Row:
    name = entry.get(data.source_key)
    longest = max((sample["input_ids"] for sample in samples), key=len)
    return Row(
        prompt_ids=longest,
        prompt=tokenizer.decode(samples[0]["input_ids"]),
        answer=None,
        source=Path(source).stem if name is None else str(name),
        entry=entry,
        samples=samples,
    )
