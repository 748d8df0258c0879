"""Prompts: JSONL rows, the model's chat template around them, and an order that a run can be gone
on from exactly.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.recipes.rows import read_rows
from helmsman.recipes.settings import Data
from helmsman.recipes.tokens import FolderTokenizer


class Row(msgspec.Struct, frozen=True):
    """A line of a file, ready to be asked."""

    prompt_ids: list[int]
    prompt: str
    """What the model is given, template included."""
    answer: Any
    source: str
    entry: dict[str, Any]
    """The whole row."""
    asked: Any = None
    """The prompt as the row has it: a text, a chat or token ids."""
    samples: list[dict[str, Any]] = []
    """The samples of a row with given answers, as the trainer takes them; ``prompt_ids`` are the
    longest one's tokens then."""


class Dataset(msgspec.Struct, frozen=True):
    """Rows to train on and rows to evaluate on."""

    train: list[Row]
    held_out: list[Row]
    num_too_long: int
    """Rows that were left out because of their length."""
    num_in_both: int = 0
    """Rows to evaluate on, from a file of their own, that are trained on as well."""


class ChatTokenizer(FolderTokenizer):
    """The tokenizer of a local Hugging Face folder, for texts and chats.

    Args:
        folder: of the model.
        data: template, its variables and the system prompt.

    Raises: ValueError, OSError.
    """

    def __init__(self, folder: str, data: Data) -> None:
        super().__init__(folder)
        if data.chat_template is not None:
            try:
                self._tokenizer.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"data.chat_template, {data.chat_template}, is no text in UTF-8: {error}"
                ) from error
        self._system, self._args = data.system_prompt, data.template_args
        self.stop_ids = tuple(sorted({self.eos_id, *_end_tokens(Path(folder))}))
        """Tokens that end an answer: the tokenizer's own, and those of generation_config.json."""

    def encode(
        self, prompt: str | Sequence[Mapping[str, Any]] | Sequence[int]
    ) -> tuple[str, list[int]]:
        """Text and tokens of a prompt as the model is given it; token ids are taken as they are.

        Without a chat template a text goes as it is, after the system prompt, and a chat is written
        out, a paragraph for each message and one for the answer, which is what models that were
        trained on plain text go on from.
        """
        if is_token_ids(prompt):
            ids: Any = prompt
            return str(self._tokenizer.decode(ids)), list(ids)
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chat = [dict(each) for each in messages]
        if self._system is not None and chat[0].get("role") != "system":
            chat.insert(0, {"role": "system", "content": self._system})
        if self._tokenizer.chat_template:
            text = str(
                self._tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True, **self._args
                )
            )
            return text, list(self._tokenizer.encode(text, add_special_tokens=False))
        if isinstance(prompt, str):
            text = "\n\n".join(str(each["content"]) for each in chat)
        else:
            text = (
                "".join(f"{each['role'].capitalize()}: {each['content']}\n\n" for each in chat)
                + "Assistant:"
            )
        return text, list(self._tokenizer.encode(text))

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text that stands by itself."""
        return list(self._tokenizer.encode(text))

    def sample(self, prompt: Any, answer: str) -> dict[str, list[int]]:
        """Return a training sample of a prompt and its answer, of which the answer and its end
        count.

        Args:
            prompt: a text, a chat or token ids.
            answer: the text.
        """
        _, ids = self.encode(prompt)
        tokens = self.encode_answer(answer)
        return {"input_ids": ids + tokens, "loss_mask": [0] * len(ids) + [1] * len(tokens)}


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


def load_dataset(
    data: Data,
    tokenizer: ChatTokenizer,
    seed: int,
    rows: list[Any] | None = None,
    encode: Callable[[str, str, dict[str, Any]], Row] | None = None,
) -> Dataset:
    """Read, encode and split.

    Args:
        data: where the rows are, and which keys they have.
        tokenizer: of the model.
        seed: of the split.
        rows: to train on, in place of ``data.train``.
        encode: makes a row with samples of (source, place, entry); prompts alone when None.

    Raises: ValueError for a row that makes no sense (with its place) or too few of them; OSError.
    """
    found, num_too_long = _read(data.train, data, tokenizer, rows, encode)
    if data.held_out is not None:
        held_out, num_more = _read(data.held_out, data, tokenizer, None, encode)
        trained_on = {row.prompt for row in found}
        num_in_both = sum(row.prompt in trained_on for row in held_out)
        return Dataset(found, held_out, num_too_long + num_more, num_in_both)
    order = list(range(len(found)))
    random.Random(f"{seed}/held out").shuffle(order)
    held_out = [found[index] for index in sorted(order[: data.num_held_out])]
    # A prompt that is there twice must not be on both sides.
    reserved = {row.prompt for row in held_out}
    train = [row for row in found if row.prompt not in reserved]
    if len(held_out) < data.num_held_out or not train:
        raise ValueError(
            f"{data.train} has {len(found)} prompts that can be used, which do not give "
            f"{data.num_held_out} to hold out and others to train on"
        )
    return Dataset(train, held_out, num_too_long)


def _read(
    source: str,
    data: Data,
    tokenizer: ChatTokenizer,
    given: list[Any] | None,
    encode: Callable[[str, str, dict[str, Any]], Row] | None,
) -> tuple[list[Row], int]:
    key, limit = (
        ("max_prompt_tokens", data.max_prompt_tokens)
        if encode is None
        else ("max_tokens", data.max_tokens)
    )
    rows: list[Row] = []
    num_too_long = 0
    for place, entry in read_rows(source, given, data.prompt_key):
        row = (
            _prompt_row(source, place, entry, data, tokenizer)
            if encode is None
            else encode(source, place, entry)
        )
        if len(row.prompt_ids) > limit:
            if data.on_long_prompt == "error":
                what = "prompt" if encode is None else "sequence"
                raise ValueError(
                    f"{place}: the {what} has {len(row.prompt_ids)} tokens; data.{key} is {limit}, "
                    "and data.on_long_prompt is 'error'"
                )
            num_too_long += 1
            continue
        rows.append(row)
    if not rows:
        raise ValueError(
            f"{source} has no row that can be used; {num_too_long} are above data.{key}"
        )
    return rows, num_too_long


def _prompt_row(
    source: str, place: str, entry: dict[str, Any], data: Data, tokenizer: ChatTokenizer
) -> Row:
    prompt: Any = entry.get(data.prompt_key)
    if not _is_prompt(prompt):
        raise ValueError(
            f"{place}: {data.prompt_key!r} is {prompt!r:.80}; expected a text, a list of "
            "{role, content}, or a list of token ids"
        )
    try:
        text, ids = tokenizer.encode(prompt)
    except Exception as error:  # templates raise what their authors made them raise
        raise ValueError(
            f"{place}: the chat template does not take this prompt: {error}"
        ) from error
    if not ids:
        raise ValueError(f"{place}: the prompt has no tokens")
    name = entry.get(data.source_key)
    source_name = Path(source).stem if name is None else str(name)
    return Row(ids, text, _answer_of(entry, data.answer_key), source_name, entry, prompt)


def _answer_of(entry: Mapping[str, Any], key: str) -> Any:
    """Return the right answer; rows made for verl have it as ``reward_model.ground_truth``."""
    if entry.get(key) is None and isinstance(entry.get("reward_model"), Mapping):
        return entry["reward_model"].get("ground_truth")
    return entry.get(key)


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    return is_token_ids(prompt) or all(
        isinstance(each, dict) and {"role", "content"} <= each.keys() for each in prompt
    )


def is_token_ids(prompt: Any) -> bool:
    """Whether a prompt is a list of token ids."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(type(each) is int and each >= 0 for each in prompt)
    )


class Draw(msgspec.Struct, frozen=True):
    """A prompt to answer several times, with a seed for each answer."""

    number: int
    """In the order of draws, from 0."""
    row: Row
    seeds: list[int]


class DrawState(msgspec.Struct, frozen=True):
    """What was used of the draws."""

    used_below: int = 0
    """All draws before this one."""
    used: list[int] = []
    """And these after it."""


class Draws:
    """All draws of a run, in order and without an end: what the n-th is depends on seed and n
    alone.

    What has been trained on, or filtered, is used. A run that goes on begins with the first that is
    not, and passes over those behind it that are; so each draw is used once, whatever was generated
    ahead when it stopped.

    Args:
        rows: to draw from, each once in an epoch.
        num_samples: answers to each.
    """

    def __init__(self, rows: Sequence[Row], *, num_samples: int, seed: int, shuffle: bool) -> None:
        self._rows, self._num_samples, self._seed, self._shuffle = rows, num_samples, seed, shuffle
        self._lock = threading.Lock()
        """Draws are taken in the thread of the episodes."""
        self._below, self._used = 0, set[int]()
        self._epoch, self._order = -1, list[int]()

    def __iter__(self) -> Iterator[Draw]:
        """Those that are not used, from the first one on."""
        number = self._below
        while True:
            with self._lock:
                skip = number in self._used
            if not skip:
                yield self.draw(number)
            number += 1

    def draw(self, number: int) -> Draw:
        """The draw of this number."""
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
        """Say that a draw was used."""
        with self._lock:
            self._used.add(number)
            while self._below in self._used:
                self._used.discard(self._below)
                self._below += 1

    @property
    def epoch(self) -> float:
        """How often the rows were gone through."""
        return self._below / len(self._rows)

    def state(self) -> DrawState:
        """What was used."""
        with self._lock:
            return DrawState(self._below, sorted(self._used))

    def restore(self, state: DrawState) -> None:
        """Go back to what was used at another time. Iterators from before are of no use any
        more.
        """
        with self._lock:
            self._below, self._used = state.used_below, set(state.used)
