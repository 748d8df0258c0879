"""Training samples from rows with answers: supervised examples and preference pairs."""

from __future__ import annotations

from typing import Any

from helmsman.recipes.messages import Chat, is_token_ids, messages_of, variables_of
from helmsman.recipes.prompts import ChatTokenizer, Encode, Row, Sample, common
from helmsman.recipes.rows import RowError, unlike
from helmsman.recipes.settings import Data

_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "attention_mask")
"""Keys with a 0 for each token that is not trained on."""
_PAIR = ("chosen", "rejected")


def supervised(data: Data, tokenizer: ChatTokenizer) -> Encode:
    """Return the encoder of supervised examples.

    A row has ``input_ids`` (with ``labels`` or masks), ``messages`` (or ``conversations``), a
    prompt with an answer (or ``completion``), or ``text``. Of chats, the assistant's turns are
    trained on, and prompts are not.
    """

    def encode(row: Any) -> Row:
        form = "input_ids" if is_token_ids(row) else "text" if isinstance(row, str) else "messages"
        entry = row if isinstance(row, dict) else {form: row}
        given = {key: value for key, value in entry.items() if value is not None}
        chats = [key for key in ("messages", "conversations") if key in given]
        answers = [key for key in dict.fromkeys((data.answer_key, "completion")) if key in given]
        if "input_ids" in given:
            return _row(entry, tokenizer, [_tokenized(given, tokenizer)])
        if chats:
            messages = messages_of(given[chats[0]], repr(chats[0]))
            chat = Chat(messages, variables_of(given), repr(chats[0]))
            return _row(entry, tokenizer, tokenizer.turns(chat))
        if data.prompt_key in given and answers:
            if len(answers) > 1:
                raise RowError(
                    f"the row has {' and '.join(map(repr, answers))}, expected one answer "
                    "(data.answer_key)"
                )
            answer = {repr(answers[0]): _text_of(given[answers[0]])}
            samples = tokenizer.answers(given[data.prompt_key], answer, variables_of(given))
            return _row(entry, tokenizer, samples)
        if "text" in given:
            if not isinstance(given["text"], str) or not given["text"]:
                raise unlike("'text'", given["text"], "a text")
            return _row(entry, tokenizer, [tokenizer.text(given["text"])])
        raise RowError(
            f"the row has {', '.join(map(repr, given)) or 'no values'}, expected 'input_ids', "
            f"'messages', {data.prompt_key!r} with {data.answer_key!r}, or a 'text'"
        )

    return encode


def preferences(data: Data, tokenizer: ChatTokenizer) -> Encode:
    """Return the encoder of preference pairs.

    A row has a prompt, and ``chosen`` and ``rejected``, each a text, a message or messages. Without
    a prompt, they are texts or chats that share their beginning.
    """

    def encode(row: Any) -> Row:
        entry: dict[str, Any] = row if isinstance(row, dict) else {}
        if missing := [name for name in _PAIR if entry.get(name) is None]:
            raise unlike(repr(missing[0]), None, "a prompt with 'chosen' and 'rejected'")
        pair: dict[str, Any] = {repr(name): _text_of(entry[name]) for name in _PAIR}
        chosen: Any
        rejected: Any
        prompt = entry.get(data.prompt_key)
        if prompt is None:
            are_texts = all(isinstance(each, str) for each in pair.values())
            chosen, rejected = (
                each if are_texts else messages_of(each, name) for name, each in pair.items()
            )
            shared = common(chosen, rejected)
            if are_texts and chosen[:shared].endswith(" "):
                shared -= 1  # tokens begin with a space rather than end with one
            prompt, ends = chosen[:shared], (chosen[shared:], rejected[shared:])
            if not (prompt and all(ends)):
                raise unlike(
                    repr(data.prompt_key), None, "a prompt, or the same beginning of both answers"
                )
            if are_texts:
                return _row(entry, tokenizer, tokenizer.continuations(prompt, ends))
            pair = dict(zip(pair, ends, strict=True))
        samples = tokenizer.answers(prompt, pair, variables_of(entry))
        if len(samples) != len(_PAIR):
            raise RowError(
                "'chosen' or 'rejected' has turns that the chat template renders otherwise when "
                "others follow, expected a template that only appends"
            )
        start = min(each["loss_mask"].index(1) for each in samples)
        for mask in (each["loss_mask"] for each in samples):
            mask[start : mask.index(1)] = [1] * (mask.index(1) - start)
        return _row(entry, tokenizer, samples)

    return encode


def _tokenized(entry: dict[str, Any], tokenizer: ChatTokenizer) -> Sample:
    ids = entry["input_ids"]
    if not is_token_ids(ids):
        raise unlike("'input_ids'", ids, "token ids")
    masks = {name: entry[name] for name in _MASKS if name in entry}
    if isinstance(labels := entry.get("labels", []), list) and "labels" in entry:
        masks["labels"] = [int(each != -100) for each in labels]
        if any(each not in (-100, id_) for each, id_ in zip(labels, ids, strict=False)):
            raise unlike("'labels'", labels, "the token ids or -100")
    for name, mask in masks.items():
        if not isinstance(mask, list) or len(mask) != len(ids) or not {0, 1}.issuperset(mask):
            raise unlike(repr(name), mask, f"{len(ids)} numbers of 0 and 1")
    mask = [int(all(each)) for each in zip([1] * len(ids), *masks.values(), strict=True)]
    return {"input_ids": tokenizer.known(ids, "'input_ids'"), "loss_mask": mask}


def _text_of(answer: Any) -> Any:
    """Return an answer, a number as its text."""
    return str(answer) if type(answer) in (int, float) else answer


def _row(entry: dict[str, Any], tokenizer: ChatTokenizer, samples: list[Sample]) -> Row:
    longest = max((sample["input_ids"] for sample in samples), key=len)
    prompt = tokenizer.decode(samples[0]["input_ids"])
    return Row(longest, prompt, None, "", entry, samples=samples)
