"""Prompts: rows, chat templates, and a resumable order of the data."""

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
    samples: list[dict[str, Any]] = []
    """Training samples of a row with given answers; ``prompt_ids`` then has the tokens of the
    longest sample."""


class Dataset(msgspec.Struct, frozen=True):
    """Rows to train on and rows to evaluate on."""

    train: list[Row]
    held_out: list[Row]
    num_too_long: int
    """Number of rows left out because of their length."""
    num_in_both: int = 0
    """Number of held-out rows from a separate file that are also in ``train``."""


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
                self._tokenizer.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"data.chat_template, {data.chat_template}, is not UTF-8 text: {error}"
                ) from error
        self._system, self._args = data.system_prompt, data.template_args
        self.stop_ids = tuple(sorted({self.eos_id, *_end_tokens(Path(folder))}))
        """Stop tokens of the tokenizer and of generation_config.json."""

    def encode(
        self, prompt: str | Sequence[Mapping[str, Any]] | Sequence[int]
    ) -> tuple[str, list[int]]:
        """Return text and tokens of a prompt; token ids are passed on unchanged.

        Without a chat template, a text follows the system prompt unchanged. A chat becomes one
        paragraph per message and the start of one for the answer, a form that models trained on
        plain text can continue.
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
        """Return the tokens of a text, without chat template."""
        return list(self._tokenizer.encode(text))

    def sample(self, prompt: Any, answer: str) -> dict[str, list[int]]:
        """Return a training sample whose loss mask covers the answer and its end token.

        Args:
            prompt: A text, a chat or token ids.
            answer: Text of the answer.
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
    """Read, encode and split the data.

    Args:
        data: Sources and keys of the rows.
        tokenizer: The tokenizer of the model.
        seed: Seed of the split.
        rows: Rows to train on, in place of ``data.train``.
        encode: Makes a row with samples from (source, place, entry); None reads prompts only.

    Returns:
        The rows for training and evaluation.

    Raises:
        ValueError: A row is invalid (with its place), or there are too few rows.
        OSError: A file cannot be read.
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
    # Duplicates of held-out prompts must not be trained on.
    reserved = {row.prompt for row in held_out}
    train = [row for row in found if row.prompt not in reserved]
    if len(held_out) < data.num_held_out or not train:
        raise ValueError(
            f"{data.train} has {len(found)} usable prompts, too few to hold out "
            f"{data.num_held_out} and train on others"
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
        raise ValueError(f"{source} has no usable row; {num_too_long} are above data.{key}")
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
    except Exception as error:  # templates may raise any exception
        raise ValueError(
            f"{place}: the chat template does not take this prompt: {error}"
        ) from error
    if not ids:
        raise ValueError(f"{place}: the prompt has no tokens")
    name = entry.get(data.source_key)
    source_name = Path(source).stem if name is None else str(name)
    return Row(ids, text, _answer_of(entry, data.answer_key), source_name, entry, prompt)


def _answer_of(entry: Mapping[str, Any], key: str) -> Any:
    """Return the correct answer, for rows made for verl from ``reward_model.ground_truth``."""
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
