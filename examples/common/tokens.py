"""Tokenizers: a small one made for the tasks, and those of local Hugging Face folders."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from examples.common.tasks import TaskSet
from helmsman.recipes.tokens import FolderTokenizer

_SPECIAL = ("<pad>", "<eos>", "<sep>", "<unk>")
_PIECES = re.compile(r" ?[^\W\d_]{2,}|[^\w\s] |.", re.DOTALL)


class Tokenizer(Protocol):
    """The methods of a tokenizer that the training loop calls."""

    eos_id: int
    """Token that ends an answer."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""

    def encode_answer(self, text: str) -> list[int]:
        """Return the tokens of an answer, end token included."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated tokens, without special ones."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer in the Hugging Face layout, beside the model."""


def make_tokenizer(model: str | None, tasks: TaskSet) -> Tokenizer:
    """Return the tokenizer of a model folder, or a new one for the tasks."""
    if model is not None:
        return FolderTokenizer(model)
    return CharTokenizer(
        [task.prompt for task in tasks.train], [task.answer or "" for task in tasks.train]
    )


def longest(tasks: TaskSet, tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the tokens of the longest prompt and of the longest known answer."""
    all_tasks = [*tasks.train, *tasks.held_out]
    prompt = max(len(tokenizer.encode_prompt(task.prompt)) for task in all_tasks)
    return prompt, max(len(tokenizer.encode_answer(task.answer or "")) for task in all_tasks)


def small_model(tokenizer: Tokenizer, max_len: int) -> dict[str, Any]:
    """Return the configuration of a new model of 0.6 million parameters, which learns short tasks
    within minutes on a processor core.

    The model is a llama because transformers then loads the tokenizer of the folder; for other
    families, such as qwen2, it always takes the tokenizer class of the family.
    """
    assert isinstance(tokenizer, CharTokenizer)
    return {
        "model_type": "llama",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": max_len,
        "initializer_range": 0.04,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }


class CharTokenizer:
    """One token per character, and one for each phrase that (nearly) all prompts share.

    The phrases keep sequences short, since the wording of a task is always the same. It is a
    ``tokenizers`` tokenizer, and ``transformers.AutoTokenizer`` loads the files of ``save``.
    """

    def __init__(self, prompts: Sequence[str], answers: Sequence[str]) -> None:
        """Make the vocabulary from texts to train on."""
        from tokenizers import Regex, decoders, models, pre_tokenizers, processors
        from tokenizers import Tokenizer as FastTokenizer

        phrases = _shared_phrases(prompts)
        characters = sorted(set("".join(prompts)) | set("".join(answers)))
        vocabulary = {
            token: index for index, token in enumerate([*_SPECIAL, *phrases, *characters])
        }
        tokenizer = FastTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        pattern = "|".join([*map(re.escape, phrases), r"[\s\S]"])
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <sep>", special_tokens=[("<sep>", vocabulary["<sep>"])]
        )
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens(list(_SPECIAL))
        self._tokenizer = tokenizer
        self.eos_id = vocabulary["<eos>"]
        self.pad_id = vocabulary["<pad>"]
        self.vocab_size = len(vocabulary)

    def encode_prompt(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_answer(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [*ids, self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _shared_phrases(prompts: Sequence[str]) -> list[str]:
    """Return the common start and end of all prompts, and words that at least half of them have;
    the longest phrase comes first, as matching requires.
    """
    start = _common_start(prompts)
    end = _common_start([prompt[len(start) :][::-1] for prompt in prompts])[::-1]
    counts = Counter(
        piece for prompt in prompts for piece in set(_PIECES.findall(prompt[len(start) :]))
    )
    words = [
        piece for piece, count in counts.items() if len(piece) > 1 and 2 * count >= len(prompts)
    ]
    return sorted(
        {phrase for phrase in [start, end, *words] if len(phrase) > 1},
        key=lambda phrase: (-len(phrase), phrase),
    )


def _common_start(texts: Sequence[str]) -> str:
    # A prefix of these two is one of all prompts that sort between them.
    first, last = (
        min(texts),
        max(texts),
    )
    same = (a == b for a, b in zip(first, last, strict=False))
    return first[
        : next((index for index, equal in enumerate(same) if not equal), min(len(first), len(last)))
    ]
