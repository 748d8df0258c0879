"""Training samples from rows with answers: supervised examples and preference pairs."""

from __future__ import annotations

import math
from typing import Any

from helmsman.recipes.messages import Chat, is_token_ids, messages_of, variables_of, with_columns
from helmsman.recipes.prompts import ChatTokenizer, Encode, Row, Sample, common
from helmsman.recipes.rows import RowError, unlike
from helmsman.recipes.settings import Data

_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "attention_mask", "labels")
"""Keys with a 0 for each token that is not trained on; in labels a -100, and else the token."""
_LABELS = ("label", "kto_tag")
"""Keys that say whether an answer is good."""
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
        for key in _LABELS:
            if given.get(key) is False or str(given.get(key)).lower() == "false":
                raise unlike(repr(key), given[key], "true: a bad answer is not to be trained on")
        begin, role = (chats[:1], "") if chats else ([data.prompt_key], "user")
        given = with_columns(given, begin, [*answers, "text"], role)
        if "input_ids" in given:
            samples = [_tokenized(given, tokenizer)]
        elif chats:
            messages = messages_of(given[chats[0]], repr(chats[0]))
            samples = tokenizer.turns(Chat(messages, variables_of(given), repr(chats[0])))
        elif data.prompt_key in given and answers:
            if len(answers) > 1:
                raise RowError(
                    f"the row has {' and '.join(map(repr, answers))}, expected one answer "
                    "(data.answer_key)"
                )
            prompt, answer = given[data.prompt_key], _text_of(given[answers[0]])
            samples = tokenizer.answer(prompt, repr(answers[0]), answer, variables_of(given))
        elif "text" in given:
            if not isinstance(given["text"], str) or not given["text"]:
                raise unlike("'text'", given["text"], "a text")
            samples = [tokenizer.continuation("", given["text"], {})]
        else:
            raise RowError(
                f"the row has {', '.join(map(repr, given)) or 'no values'}, expected 'input_ids', "
                f"'messages', {data.prompt_key!r} with {data.answer_key!r}, or a 'text'"
            )
        return _row(entry, tokenizer, samples)

    return encode


def preferences(data: Data, tokenizer: ChatTokenizer) -> Encode:
    """Return the encoder of preference pairs.

    A row has a prompt, and ``chosen`` and ``rejected``, each a text, a message or messages. Without
    a prompt, they are texts or chats that share their beginning.
    """

    def encode(row: Any) -> Row:
        entry: dict[str, Any] = row if isinstance(row, dict) else {}
        is_shared = entry.get(data.prompt_key) is None
        begin, role = (_PAIR, "") if is_shared else ([data.prompt_key], "user")
        entry = with_columns(entry, begin, _PAIR, role)
        if missing := [name for name in _PAIR if entry.get(name) is None]:
            raise unlike(repr(missing[0]), None, "a prompt with 'chosen' and 'rejected'")
        pair = [_text_of(entry[name]) for name in _PAIR]
        if not (are_texts := all(isinstance(each, str) for each in pair)):
            pair = [messages_of(_text_of(entry[name]), repr(name), "assistant") for name in _PAIR]
        prompt: Any = entry.get(data.prompt_key)
        if is_shared:
            shared = common(*pair)
            if are_texts and pair[0][:shared].endswith(" "):
                shared -= 1  # tokens begin with a space rather than end with one
            prompt, pair = pair[0][:shared], [each[shared:] for each in pair]
            if not (prompt and all(pair)):
                raise unlike(
                    repr(data.prompt_key), None, "a prompt, or the same beginning of both answers"
                )
        variables = variables_of(entry)
        if is_shared and are_texts:
            samples = [tokenizer.continuation(prompt, each, variables) for each in pair]
        else:
            answers = zip(map(repr, _PAIR), pair, strict=True)
            made = [tokenizer.answer(prompt, *each, variables) for each in answers]
            samples = [sample for each in made for sample in each]
        if len(samples) != len(_PAIR):
            raise RowError(
                "'chosen' or 'rejected' has turns that the chat template renders otherwise when "
                "others follow, expected a template that only appends"
            )
        if samples[0] == samples[1] and pair[0] != pair[1]:
            raise RowError(
                "'chosen' and 'rejected' differ, but have equal tokens, expected a chat template "
                "that renders the difference (data.chat_template)"
            )
        masks = [each["loss_mask"] for each in samples]
        starts = [[*mask, 1].index(1) for mask in masks]
        for mask, start in zip(masks, starts, strict=True):
            mask[min(starts) : start] = [1] * (start - min(starts))
        return _row(entry, tokenizer, samples)

    return encode


def _tokenized(entry: dict[str, Any], tokenizer: ChatTokenizer) -> Sample:
    if not is_token_ids(ids := entry["input_ids"]):
        raise unlike("'input_ids'", ids, "token ids")
    mask = [1] * len(tokenizer.known(ids, "'input_ids'"))
    alone = {"position_ids": list(range(len(ids))), "seq_lengths": [len(ids)]}
    alone["cu_seqlens"] = [0, len(ids)]
    for name, given in entry.items():
        if name.endswith(("_mask", "_masks")) and name not in _MASKS:
            raise unlike(repr(name), given, f"a mask with one of the names {', '.join(_MASKS)}")
        if given != alone.get(name, given):
            raise unlike(repr(name), given, f"{alone[name]}: one sequence for each row")
    for name in (each for each in _MASKS if each in entry):
        given, is_labels = entry[name], name == "labels"
        off, on = (-100, ids) if is_labels else (0, [1] * len(ids))
        is_list = isinstance(given, list) and len(given) == len(ids)
        if not is_list or any(each not in (off, id_) for each, id_ in zip(given, on, strict=True)):
            numbers = f"{len(ids)} numbers of 0 and 1"
            raise unlike(repr(name), given, "the token ids or -100" if is_labels else numbers)
        mask = [int(counts and each != off) for counts, each in zip(mask, given, strict=True)]
    return {"input_ids": ids, "loss_mask": mask}


def _text_of(answer: Any) -> Any:
    """Return an answer, a number as its text.

    Raises:
        RowError: It is infinite, or a whole float: a table makes one of 7 in a column with nulls.
    """
    if isinstance(answer, float) and (answer.is_integer() or math.isinf(answer)):
        raise RowError(f"an answer is the float {answer}, expected a text or an integer")
    return str(answer) if type(answer) in (int, float) else answer


def _row(entry: dict[str, Any], tokenizer: ChatTokenizer, samples: list[Sample]) -> Row:
    longest = max((sample["input_ids"] for sample in samples), key=len)
    prompt = tokenizer.decode(samples[0]["input_ids"])
    return Row(longest, prompt, None, "", entry, samples=samples)
