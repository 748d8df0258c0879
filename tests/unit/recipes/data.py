"""Files and settings shared by the tests of the GRPO recipe."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helmsman import GenerationResult
from helmsman.recipes import config
from helmsman.recipes.scorer import Completion
from helmsman.recipes.settings import GRPOSettings

CONFIGS = Path(__file__).parents[3] / "helmsman" / "recipes" / "configs"

SUMS = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b), "data_source": "small" if a < 5 else "large"}
    for a in range(10)
    for b in range(10)
]


def write_jsonl(path: Path, entries: Sequence[dict[str, Any]] = SUMS) -> Path:
    """Write a line for each entry; returns the path."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def completed(text: str) -> asyncio.Future[Completion]:
    """Return a complete answer of one token, which decodes to this text."""
    result = GenerationResult(
        request_id="r", token_ids=[7], logprobs=[0.0], versions=[0], stop_reason="stop"
    )
    answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    answer.set_result(Completion(text, result))
    return answer


def settings(*overrides: tuple[str, str], name: str = "cpu_smoke.yaml") -> GRPOSettings:
    """Load the settings of a file of the recipe, with overrides."""
    return config.load(GRPOSettings, CONFIGS / name, overrides)
