"""Writes inputs of the recipe ``demo``: ``python -m helmsman.recipes.demo FOLDER [WIDTH]``."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from helmsman.recipes.sft import SFT
from helmsman.recipes.tiny_model import make_model

_NUM_HELD_OUT = 128
_NUM_SUPERVISED = 12
"""Supervised steps, after which the model names a right digit now and then."""


def write_inputs(folder: Path, width: int = 64) -> None:
    """Write a small model, and puzzles that ask for the largest of some digits.

    The model is random at first, and learns the form of the answers by a few supervised steps.

    Args:
        folder: The folder; it gets ``train.jsonl``, ``held_out.jsonl`` and ``sft/model``.
        width: Hidden size of the model.
    """
    rng, rows = random.Random(0), dict[str, str]()
    for _ in range(1200):
        largest = rng.randint(1, 9)  # each is as frequent as the others
        digits = [largest, *(rng.randint(0, largest) for _ in range(rng.randint(2, 4)))]
        rng.shuffle(digits)
        rows["max " + "".join(map(str, digits))] = str(largest)
    initial = make_model(folder / "initial", num_layers=2, width=width)
    lines = [json.dumps({"prompt": text, "answer": answer}) for text, answer in rows.items()]
    (folder / "held_out.jsonl").write_text("\n".join(lines[:_NUM_HELD_OUT]))
    (folder / "train.jsonl").write_text("\n".join(lines[_NUM_HELD_OUT:]))
    SFT(
        initial,
        folder / "train.jsonl",
        steps=_NUM_SUPERVISED,
        train={"lr": 0.064 / width},
        cluster={"scheduler": "inline"},
        out=str(folder / "sft"),
        overwrite=True,
    ).train()


if __name__ == "__main__":
    write_inputs(Path(sys.argv[1]), *map(int, sys.argv[2:]))
