"""Folders with a tokenizer, and the rows that a recipe makes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helmsman.recipes import DPO, GRPO, SFT
from helmsman.recipes.prompts import Row
from helmsman.recipes.tiny_model import CHAT_TEMPLATE, make_tokenizer

RECIPES: dict[str, Any] = {"SFT": SFT, "DPO": DPO, "GRPO": GRPO}
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def call(arguments: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a message."""
    return [{"type": "function", "function": {"name": "look", "arguments": arguments}}]


def tokenizer_folder(folder: Path, template: str | None = CHAT_TEMPLATE, **config: Any) -> Path:
    """Write a tokenizer of characters whose special tokens include <bos> and <eot>."""
    from tokenizers import Tokenizer

    make_tokenizer(folder, template)
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(["<bos>", "<eot>"])
    fast.add_tokens(list("()[]'\"_#|!"))
    fast.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def load(recipe: str, data: Any, folder: Path, **settings: Any) -> list[Row]:
    """Return the rows that a recipe reads, without a run."""
    more = {"rewards": ["exact"]} if recipe == "GRPO" else {}
    made = RECIPES[recipe](model=str(folder), data=data, **more, **settings)
    made.load()
    rows: list[Row] = made.dataset.train
    return rows


def texts(row: Row, folder: Path, *, trained: bool = True) -> list[str]:
    """Return the text of each sample: of the tokens that count, or of all."""
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(str(folder)).decode
    return [
        decode(
            [
                token
                for token, counts in zip(each["input_ids"], each["loss_mask"], strict=True)
                if counts or not trained
            ]
        )
        for each in row.samples
    ]
