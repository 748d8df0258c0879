"""Prompts and samples: encoded rows, and a resumable order of the data."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from helmsman.recipes.messages import (
    Chat,
    decoded,
    is_token_ids,
    messages_of,
    variables_of,
    with_columns,
)
from helmsman.recipes.rows import RowError, paths_of, read_rows, unlike, without
from helmsman.recipes.settings import Data
from helmsman.recipes.tokens import ChatTokenizer, Sample, common


class Row(msgspec.Struct, frozen=True):
    """A row of the data with its encoded prompt."""

    prompt_ids: list[int]
    prompt: str
    """The text given to the model, template included."""
    answer: Any
    source: str
    entry: dict[str, Any]
    """The whole row."""
    asked: Any = None
    """The prompt as it is in the row: a text, a chat or token ids."""
    place: str = ""
    """File and number of the row."""
    samples: list[Sample] = []
    """Training samples of a row with given answers; ``prompt_ids`` then has the tokens of the
    longest sample."""


class Dataset(msgspec.Struct):
    """Rows to train on and rows to evaluate on."""

    train: list[Row] = []
    held_out: list[Row] = []
    num_too_long: int = 0
    """Number of rows left out because of their length."""
    num_in_both: int = 0
    """Number of held-out rows from a separate file that are also in ``train``."""
    num_rows: int = 0
    """Number of all rows that were read."""
    skipped: list[str] = []
    """The errors of rows left out by data.on_bad_row."""


_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "attention_mask", "labels")
"""Keys with a 0 for each token that is not trained on; in labels a -100, and else the token."""
_LABELS = ("label", "kto_tag")
"""Keys that say whether an answer is good."""
_PAIR = ("chosen", "rejected")

Encode = Callable[[Any, Data, ChatTokenizer], Row]
"""Makes a row without a source from a mapping, a text, a chat or token ids; raises RowError."""


def prompts(row: Any, data: Data, tokenizer: ChatTokenizer) -> Row:
    """Encode a row with a prompt only."""
    entry = row if isinstance(row, dict) else {data.prompt_key: row}
    asked = with_columns(entry, [data.prompt_key], [data.answer_key], "user")
    if (prompt := asked.get(data.prompt_key)) is None:
        raise without(entry, f"{data.prompt_key!r} (data.prompt_key)")
    text, ids = tokenizer.encode(prompt, variables_of(entry))
    if (answer := entry.get(data.answer_key)) is None:  # as in rows for verl
        with contextlib.suppress(RowError):
            model = decoded(entry.get("reward_model"), "'reward_model'")
            answer = model.get("ground_truth") if isinstance(model, dict) else None
    return Row(tokenizer.known(ids, "the row"), text, answer, "", entry, prompt)


def supervised(row: Any, data: Data, tokenizer: ChatTokenizer) -> Row:
    """Encode a supervised example.

    A row has ``input_ids`` (with ``labels`` or masks), ``messages`` (or ``conversations``), a
    prompt with an answer (or ``completion``), or ``text``. Of chats, the assistant's turns are
    trained on, and prompts are not.
    """
    form = "input_ids" if is_token_ids(row) else "text" if isinstance(row, str) else "messages"
    entry = row if isinstance(row, dict) else {form: row}
    given = {key: value for key, value in entry.items() if value is not None}
    chat = next((key for key in ("messages", "conversations") if key in given), "")
    answers = [key for key in dict.fromkeys((data.answer_key, "completion")) if key in given]
    for key in _LABELS:
        if str(given.get(key)).lower() == "false":
            raise unlike(repr(key), given[key], "true: a bad answer is not to be trained on")
    role = "" if chat else "user"
    given = with_columns(given, [chat or data.prompt_key], [*answers, "text"], role)
    if "input_ids" in given:
        samples = [_tokenized(given, tokenizer)]
    elif chat:
        messages = messages_of(given[chat], repr(chat))
        samples = tokenizer.turns(Chat(messages, variables_of(given), repr(chat)))
    elif data.prompt_key in given and answers:
        if len(answers) > 1:
            raise without(answers, "one answer (data.answer_key)")
        prompt, answer = given[data.prompt_key], _text_of(given[answers[0]])
        samples = tokenizer.answer(prompt, repr(answers[0]), answer, variables_of(given))
    elif "text" in given:
        if not isinstance(given["text"], str) or not given["text"]:
            raise unlike("'text'", given["text"], "a text")
        samples = [tokenizer.continuation("", given["text"], {})]
    else:
        pair = f"{data.prompt_key!r} with {data.answer_key!r}"
        raise without(given, f"'input_ids', 'messages', {pair}, or a 'text'")
    return _row(entry, tokenizer, samples)


def preferences(row: Any, data: Data, tokenizer: ChatTokenizer) -> Row:
    """Encode a preference pair.

    A row has a prompt, and ``chosen`` and ``rejected``, each a text, a message or messages. Without
    a prompt, they are texts or chats that share their beginning.
    """
    entry: dict[str, Any] = row if isinstance(row, dict) else {}
    is_shared = entry.get(data.prompt_key) is None
    begin, role = (_PAIR, "") if is_shared else ([data.prompt_key], "user")
    entry = with_columns(entry, begin, _PAIR, role)
    if missing := [name for name in _PAIR if entry.get(name) is None]:
        raise unlike(repr(missing[0]), None, "a prompt with 'chosen' and 'rejected'")
    prompt: Any = entry.get(data.prompt_key)
    pair = {name: _text_of(entry[name]) for name in _PAIR}
    if not (are_texts := all(isinstance(each, str) for each in pair.values())):
        pair = {name: messages_of(pair[name], repr(name), "assistant") for name in _PAIR}
    chosen, rejected = pair.values()
    if is_shared:
        size = common(chosen, rejected)
        if are_texts and chosen[:size].endswith(" "):
            size -= 1  # tokens begin with a space rather than end with one
        prompt, pair = chosen[:size], {name: pair[name][size:] for name in _PAIR}
        if not (prompt and all(pair.values())):
            expected = "a prompt, or the same beginning of both answers"
            raise unlike(repr(data.prompt_key), None, expected)
    variables, samples = variables_of(entry), list[Sample]()
    for name, answer in pair.items():
        if is_shared and are_texts:
            samples.append(tokenizer.continuation(prompt, answer, variables))
        else:
            samples += tokenizer.answer(prompt, repr(name), answer, variables)
    if len(samples) != len(_PAIR):
        raise RowError(
            "'chosen' or 'rejected' has turns that the chat template renders otherwise when "
            "others follow, expected a template that only appends"
        )
    if samples[0] == samples[1] and chosen != rejected:
        raise RowError(
            "'chosen' and 'rejected' differ, but have equal tokens, expected a chat template "
            "that renders the difference (data.chat_template)"
        )
    starts = [[*each["loss_mask"], 1].index(1) for each in samples]
    for each, start in zip(samples, starts, strict=True):
        each["loss_mask"][min(starts) : start] = [1] * (start - min(starts))
    return _row(entry, tokenizer, samples)


def _tokenized(entry: dict[str, Any], tokenizer: ChatTokenizer) -> Sample:
    if not is_token_ids(ids := entry["input_ids"]):
        raise unlike("'input_ids'", ids, "token ids")
    size = len(tokenizer.known(ids, "'input_ids'"))
    mask = [1] * size
    alone = {"position_ids": [*range(size)], "seq_lengths": [size], "cu_seqlens": [0, size]}
    for name, given in entry.items():
        if name.endswith(("_mask", "_masks")) and name not in _MASKS:
            raise unlike(repr(name), given, f"a mask with one of the names {', '.join(_MASKS)}")
        if given != alone.get(name, given):
            raise unlike(repr(name), given, f"{alone[name]}: one sequence for each row")
        if name in _MASKS:
            on, off = (ids, -100) if name == "labels" else ([1] * size, 0)
            is_list = isinstance(given, list) and len(given) == size
            if not is_list or any(a not in (off, b) for a, b in zip(given, on, strict=True)):
                numbers = f"{size} numbers of 0 and 1"
                raise unlike(repr(name), given, "the token ids or -100" if off else numbers)
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
    longest = max((tokenizer.known(each["input_ids"], "the row") for each in samples), key=len)
    if not all(any(each["loss_mask"][1:]) for each in samples):
        raise RowError("the row has no token to train on, expected an answer")
    prompt = tokenizer.decode(samples[0]["input_ids"])
    return Row(longest, prompt, None, "", entry, samples=samples)


def load_dataset(
    data: Data,
    tokenizer: ChatTokenizer,
    seed: int,
    rows: Mapping[Any, list[Any]] | None = None,
    encode: Encode = prompts,
) -> Dataset:
    """Read, encode and split the data.

    Args:
        data: Sources and keys of the rows.
        tokenizer: The tokenizer of the model.
        seed: Seed of the split.
        rows: Rows that a script passed, by the names that they have in ``data``.
        encode: Encoder of rows.

    Returns:
        The rows for training and evaluation.

    Raises:
        ValueError: A row is invalid (with its place), or there are too few rows.
        OSError: A file cannot be read.
    """
    if data.subset is not None:
        sources = [*paths_of(data.train), *paths_of(data.held_out or ())]
        if not any(map(os.path.isdir, sources)):
            where = f"data has no subsets ({data.train})"
            raise ValueError(f"{where}: data.subset is {data.subset!r}, expected null")

    def read(source: Any, split: str | None, default: str) -> Dataset:
        found = read_rows(source, rows or {}, split, default, data.subset)
        return _usable(source, found, data, encode, tokenizer)

    found = read(data.train, data.split, "train")
    if data.held_out is not None or data.held_out_split is not None:
        is_other = data.held_out is not None
        source, default = (data.held_out, "test") if is_other else (data.train, "train")
        other = read(source, data.held_out_split, default)
        trained_on = {row.prompt for row in found.train}
        found.held_out = other.train
        found.num_in_both = sum(row.prompt in trained_on for row in other.train)
        found.num_rows += other.num_rows
        found.num_too_long += other.num_too_long
        found.skipped += other.skipped
        return found
    order = list(range(len(found.train)))
    random.Random(f"{seed}/held out").shuffle(order)
    found.held_out = [found.train[at] for at in sorted(order[: data.num_held_out])]
    # Duplicates of held-out prompts must not be trained on.
    reserved = {row.prompt for row in found.held_out}
    train = [row for row in found.train if row.prompt not in reserved]
    if len(found.held_out) < data.num_held_out or not train:
        raise ValueError(
            f"{data.train} has {len(found.train)} usable prompts, too few to hold out "
            f"{data.num_held_out} and train on others"
        )
    found.train = train
    return found


def _usable(
    source: Any, entries: Iterable[Any], data: Data, encode: Encode, tokenizer: ChatTokenizer
) -> Dataset:
    """Return the usable rows of a source, and the numbers of others."""
    found = Dataset()
    for name, place, entry in entries:
        found.num_rows += 1
        try:
            if isinstance(entry, RowError):
                raise entry
            row = encode(entry, data, tokenizer)
        except (RowError, UnicodeError) as error:
            found.skipped.append(f"unusable row ({place}): {error}")
            if data.on_bad_row == "raise":
                advice = "Mend the row, or leave such rows out by data.on_bad_row 'skip'"
                raise ValueError(f"{found.skipped[-1]}. {advice}") from error
            continue
        what, key = ("sequence", "max_tokens") if row.samples else ("prompt", "max_prompt_tokens")
        limit, name_of_limit = tokenizer.limit(data, key)
        if (length := len(row.prompt_ids)) <= limit:
            label = row.entry.get(data.source_key)
            label = name if label is None else str(label)
            found.train.append(msgspec.structs.replace(row, source=label, place=place))
        elif data.on_long_prompt == "drop":
            found.num_too_long += 1
        else:
            raise ValueError(
                f"{place}: the {what} has {length} tokens; {name_of_limit} is {limit}, and "
                "data.on_long_prompt is 'error'"
            )
    if not found.train:
        raise ValueError(
            f"data has no usable row ({source}): {found.num_too_long} of {found.num_rows} are "
            "longer than data.max_tokens, data.max_prompt_tokens or the model's context length, "
            f"{len(found.skipped)} unusable, expected one. "
            f"{found.skipped[0] if found.skipped else 'Raise the limit.'}"
        )
    return found


class Draw(msgspec.Struct, frozen=True):
    """A prompt to answer several times, with a seed for each answer."""

    number: int
    """Position in the order of draws, from 0."""
    row: Row
    seeds: list[int]


class DrawState(msgspec.Struct, frozen=True):
    """The used draws."""

    used_below: int = 0
    """All draws below this number are used."""
    used: list[int] = []
    """Further used draws, all above ``used_below``."""


class Draws:
    """The endless sequence of draws of a run; the n-th depends only on seed and n.

    A draw is used once it has been trained on or filtered. A resumed run starts at the first unused
    draw and skips used ones after it, so each draw is used once, even if the previous run had
    generated ahead.

    Args:
        rows: Rows to draw from, each once per epoch.
        num_samples: Answers per draw.
        seed: Seed of the order and of the answers.
        shuffle: Whether each epoch has a new order.
    """

    def __init__(self, rows: Sequence[Row], *, num_samples: int, seed: int, shuffle: bool) -> None:
        self._rows, self._num_samples, self._seed, self._shuffle = rows, num_samples, seed, shuffle
        self._lock = threading.Lock()
        """Needed because draws are taken in the episodes' thread."""
        self._below, self._used = 0, set[int]()
        self._epoch, self._order = -1, list[int]()

    def __iter__(self) -> Iterator[Draw]:
        """Yield the unused draws in order."""
        for number in itertools.count(self._below):
            if number not in self._used:
                yield self.draw(number)

    def draw(self, number: int) -> Draw:
        """Return the draw with this number."""
        epoch, index = divmod(number, len(self._rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._rows)))
            if self._shuffle:
                random.Random(f"{self._seed}/epoch {epoch}").shuffle(self._order)
        rng = random.Random(f"{self._seed}/draw {number}")
        seeds = [rng.getrandbits(31) for _ in range(self._num_samples)]
        return Draw(number, self._rows[self._order[index]], seeds)

    def use(self, number: int) -> None:
        """Mark a draw as used."""
        with self._lock:
            self._used.add(number)
            while self._below in self._used:
                self._used.discard(self._below)
                self._below += 1

    @property
    def epoch(self) -> float:
        """Number of passes over the rows so far, with fractions."""
        return self._below / len(self._rows)

    def state(self) -> DrawState:
        """Return the used draws."""
        with self._lock:
            return DrawState(self._below, sorted(self._used))

    def restore(self, state: DrawState) -> None:
        """Restore the used draws; invalidates existing iterators."""
        with self._lock:
            self._below, self._used = state.used_below, set(state.used)
