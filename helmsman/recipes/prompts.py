"""Prompts and samples: encoded rows, and a resumable order of the data."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.recipes.messages import (
    Chat,
    Messages,
    is_token_ids,
    messages_of,
    require_named,
    variables_of,
    with_columns,
)
from helmsman.recipes.rows import RowError, read_rows, unlike
from helmsman.recipes.settings import Data
from helmsman.recipes.templates import ChatTemplate
from helmsman.recipes.tokens import FolderTokenizer

Sample = dict[str, list[int]]
"""``input_ids`` and ``loss_mask``."""


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


class ChatTokenizer(FolderTokenizer):
    """The tokenizer of a local Hugging Face folder, for texts and chats.

    Args:
        folder: Folder of the model.
        data: Settings with the template, its variables and the system prompt.

    Raises:
        ValueError: Tokenizer, template or generation_config.json is invalid.
        OSError: A file cannot be read.
    """

    def __init__(self, folder: str, data: Data) -> None:
        super().__init__(folder)
        if data.chat_template is not None:
            try:
                self.tokenizer.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"data.chat_template, {data.chat_template}, is not UTF-8 text: {error}"
                ) from error
        self._system, self._field = data.system_prompt, repr(data.prompt_key)
        stops = {self.eos_id, *_end_tokens(Path(folder))}
        self._template = ChatTemplate(self.tokenizer, data, stops)
        self.end_id = self._template.end_id
        """Token that ends an answer; None if the chat template writes none."""
        self.stop_ids = tuple(sorted(stops | {each for each in [self.end_id] if each is not None}))
        """Stop tokens: of the tokenizer, of generation_config.json and of the chat template."""
        num_embedded, self.max_positions = _limits(folder)
        self._num_tokens = min(len(self.tokenizer), num_embedded)

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
        if is_token_ids(prompt):
            text = str(self.tokenizer.decode(self.known(prompt, self._field)))
            require_named(variables or {}, text)
            return text, prompt
        if (written := self._written(prompt)) is not None:
            require_named(variables or {}, written)
            return written, self._template.ids(written, is_whole=True)
        messages = self._asked(prompt)
        chat = Chat(messages, variables or {}, self._field)
        is_begun = messages[-1]["role"] == "assistant"
        how = {"add_generation_prompt": not is_begun, "continue_final_message": is_begun}
        text = self._template.render(chat, **how)
        self._template.require_all(chat, text, **how)
        return text, self._template.ids(text)

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
        if isinstance(answer, str) and is_token_ids(prompt):
            _, begin = self.encode(prompt, variables)
            after = [*self._template.ids(answer), *([] if self.end_id is None else [self.end_id])]
            mask = [0] * len(begin) + [1] * len(after)
            return [{"input_ids": begin + after, "loss_mask": mask}]
        if isinstance(answer, str) and (text := self._written(prompt)) is not None:
            return [self.continuation(text, answer, variables)]
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
        end = (self._template.end or eos) if self._is_begun(text) else eos
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
        template, whole = self._template, self._template.render(chat)
        template.require_all(chat, whole)
        answers = [i for i, each in enumerate(chat.messages) if each["role"] == "assistant"]
        turns = [i for i in answers if i >= first and chat.messages[i].get("weight", 1)]
        if not turns:
            raise RowError(f"{chat.field} has no turn of the assistant, expected one to train on")
        parts = [template.last_part(chat.of(chat.messages[: i + 1])) for i in turns]
        if all(whole.startswith(end) for _, end in parts):
            uses_marks = not first and turns == answers
            return [(uses_marks and template.marked(chat)) or self._sample(whole, parts)]
        return [self._sample(part[1], [part]) for part in parts]

    def known(self, ids: list[int], field: str) -> list[int]:
        """Return token ids, which tokenizer and model must have."""
        if (largest := max(ids, default=0)) >= self._num_tokens:
            raise RowError(
                f"{field} has the token {largest}, expected less than {self._num_tokens}"
            )
        return ids

    def limit(self, data: Data, key: str) -> tuple[int, str]:
        """Return the number of tokens that a row may have, and the name of this limit."""
        return min(
            (getattr(data, key), f"data.{key}"), (self.max_positions, "the model's context length")
        )

    def _sample(
        self, text: str, parts: Iterable[tuple[str, str]], *, is_whole: bool = False
    ) -> Sample:
        """Return a sample that trains on parts of a text.

        Args:
            text: The text.
            parts: For each part, the text in front of it, and the text up to its end.
            is_whole: Whether the tokenizer adds its special tokens.
        """
        encode = functools.partial(self._template.ids, is_whole=is_whole)
        ids = encode(text)
        mask = [0] * len(ids)
        for begin, end in parts:
            start = common(encode(begin), ids) if begin else 0
            stop = len(ids) if end == text else common(encode(end), ids)
            mask[start:stop] = [1] * (stop - start)
        return {"input_ids": ids, "loss_mask": mask}

    def _written(self, prompt: Any) -> str | None:
        """Return the text of a prompt around which no template is put."""
        if not isinstance(prompt, str) or not prompt:
            return None
        if not self._template.is_given:
            return prompt if self._system is None else f"{self._system}\n\n{prompt}"
        return prompt if self._is_begun(prompt) else None

    def _asked(self, prompt: Any) -> Messages:
        """Return the messages of a prompt, around which no template was put."""
        messages = messages_of(prompt, self._field, "user")
        last = messages[-1]
        if last["role"] == "user" and self._template.is_given and self._is_begun(last["content"]):
            field = f"the end of {self._field}"
            raise unlike(
                field, last["content"][-80:], "none that begins an answer: the template does"
            )
        return messages

    def _is_begun(self, text: str) -> bool:
        """Return whether a text ends as the template begins an answer."""
        return bool(self._template.cue) and text.rstrip().endswith(self._template.cue)


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of first items that two sequences share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _end_tokens(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.exists():
        return []
    try:
        ids = msgspec.json.decode(path.read_bytes(), type=_Generation).eos_token_id
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    return [ids] if isinstance(ids, int) else ids or []


def _limits(folder: str) -> tuple[int, int]:
    """Return the numbers of tokens and of positions that a model has; unlimited if unknown."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (OSError, ValueError):  # without a model, or of one that the engines refuse by name
        return sys.maxsize, sys.maxsize
    positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = rope.get("original_max_position_embeddings", positions) * (rope.get("factor") or 1)
    return getattr(config, "vocab_size", sys.maxsize), max(positions, int(scaled))


Encode = Callable[[Any], Row]
"""Makes a row without a source from a mapping, a text, a chat or token ids; raises RowError."""


def prompts(data: Data, tokenizer: ChatTokenizer) -> Encode:
    """Return the encoder of rows with prompts only."""

    def encode(row: Any) -> Row:
        entry = row if isinstance(row, dict) else {data.prompt_key: row}
        asked = with_columns(entry, [data.prompt_key], [data.answer_key], "user")
        if (prompt := asked.get(data.prompt_key)) is None:
            keys = ", ".join(map(repr, entry))
            raise RowError(f"the row has {keys}, expected {data.prompt_key!r} (data.prompt_key)")
        text, ids = tokenizer.encode(prompt, variables_of(entry))
        answer, model = entry.get(data.answer_key), entry.get("reward_model")  # of rows for verl
        if answer is None and isinstance(model, str):
            with contextlib.suppress(ValueError):
                model = json.loads(model)
        if answer is None and isinstance(model, Mapping):
            answer = model.get("ground_truth")
        return Row(ids, text, answer, "", entry, prompt)

    return encode


def load_dataset(
    data: Data,
    tokenizer: ChatTokenizer,
    seed: int,
    rows: Mapping[Any, list[Any]] | None = None,
    encode: Encode | None = None,
) -> Dataset:
    """Read, encode and split the data.

    Args:
        data: Sources and keys of the rows.
        tokenizer: The tokenizer of the model.
        seed: Seed of the split.
        rows: Rows that a script passed, by the names that they have in ``data``.
        encode: Encoder of rows; None reads prompts only.

    Returns:
        The rows for training and evaluation.

    Raises:
        ValueError: A row is invalid (with its place), or there are too few rows.
        OSError: A file cannot be read.
    """
    given, encode = rows or {}, encode or prompts(data, tokenizer)
    sources = [
        path
        for each in (data.train, data.held_out or ())
        for path in ([each] if isinstance(each, str) else each)
    ]
    if data.subset is not None and not any(map(os.path.isdir, sources)):
        raise ValueError(
            f"data has no subsets ({data.train}): data.subset is {data.subset!r}, expected null"
        )
    found = read_rows(data.train, given, data.split, "train", data.subset)
    dataset = Dataset()
    dataset.train = _read(dataset, data.train, found, data, encode, tokenizer)
    if data.held_out is not None or data.held_out_split is not None:
        source = data.train if data.held_out is None else data.held_out
        default = "train" if data.held_out is None else "test"
        found = read_rows(source, given, data.held_out_split, default, data.subset)
        dataset.held_out = _read(dataset, source, found, data, encode, tokenizer)
        trained_on = {row.prompt for row in dataset.train}
        dataset.num_in_both = sum(row.prompt in trained_on for row in dataset.held_out)
        return dataset
    order = list(range(len(dataset.train)))
    random.Random(f"{seed}/held out").shuffle(order)
    dataset.held_out = [dataset.train[at] for at in sorted(order[: data.num_held_out])]
    # Duplicates of held-out prompts must not be trained on.
    reserved = {row.prompt for row in dataset.held_out}
    train = [row for row in dataset.train if row.prompt not in reserved]
    if len(dataset.held_out) < data.num_held_out or not train:
        raise ValueError(
            f"{data.train} has {len(dataset.train)} usable prompts, too few to hold out "
            f"{data.num_held_out} and train on others"
        )
    dataset.train = train
    return dataset


def _read(
    dataset: Dataset,
    source: Any,
    found: Iterable[tuple[str, str, Any]],
    data: Data,
    encode: Encode,
    tokenizer: ChatTokenizer,
) -> list[Row]:
    """Return all usable rows of a source; count those of the data set."""
    rows, num_too_long, skipped = list[Row](), 0, list[str]()
    for name, place, entry in found:
        try:
            if isinstance(entry, RowError):
                raise entry
            row = encode(entry)
            for ids in [row.prompt_ids, *(each["input_ids"] for each in row.samples)]:
                tokenizer.known(ids, "the row")
            if not all(any(each["loss_mask"][1:]) for each in row.samples):
                raise RowError("the row has no token to train on, expected an answer")
        except (RowError, UnicodeError) as error:
            skipped.append(f"unusable row ({place}): {error}")
            if data.on_bad_row == "raise":
                raise ValueError(
                    f"{skipped[-1]}. Mend the row, or leave such rows out by data.on_bad_row 'skip'"
                ) from error
            continue
        what, key = ("sequence", "max_tokens") if row.samples else ("prompt", "max_prompt_tokens")
        limit, name_of_limit = tokenizer.limit(data, key)
        if (length := len(row.prompt_ids)) > limit:
            if data.on_long_prompt == "error":
                raise ValueError(
                    f"{place}: the {what} has {length} tokens; {name_of_limit} is {limit}, and "
                    "data.on_long_prompt is 'error'"
                )
            num_too_long += 1
            continue
        label = row.entry.get(data.source_key)
        label = name if label is None else str(label)
        rows.append(msgspec.structs.replace(row, source=label, place=place))
    num_rows = len(rows) + num_too_long + len(skipped)
    if not rows:
        raise ValueError(
            f"data has no usable row ({source}): {num_too_long} of {num_rows} are longer than "
            f"data.max_tokens, data.max_prompt_tokens or the model's context length, "
            f"{len(skipped)} unusable, expected one. "
            f"{skipped[0] if skipped else 'Raise the limit.'}"
        )
    dataset.num_rows += num_rows
    dataset.num_too_long += num_too_long
    dataset.skipped += skipped
    return rows


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
        number = self._below
        while True:
            with self._lock:
                skip = number in self._used
            if not skip:
                yield self.draw(number)
            number += 1

    def draw(self, number: int) -> Draw:
        """Return the draw with this number."""
        epoch, index = divmod(number, len(self._rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._rows)))
            if self._shuffle:
                random.Random(f"{self._seed}/epoch {epoch}").shuffle(self._order)
        rng = random.Random(f"{self._seed}/draw {number}")
        return Draw(
            number,
            self._rows[self._order[index]],
            [rng.getrandbits(31) for _ in range(self._num_samples)],
        )

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
