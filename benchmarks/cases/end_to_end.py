"""Training steps of GRPO, beside TRL and beside the model's own work."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys

from benchmarks.harness import Pair, SkippedError, case
from benchmarks.world import World

_LIMIT_S = 1200.0


_BESIDE = {
    "trl": (
        "",
        ">= 0.95",
        "TRL's GRPOTrainer: same model, prompts, group size, token limit and cores",
    ),
    "bare": ("bare_", ">= 0.8", "a loop of the model's own work: decoding, one pass back, AdamW"),
}
"""Side -> prefix of its cases, goal and description.

On the CPU nearly all of a step is the model's own work: the bare loop itself is only 1.1 times as
fast as TRL, and no trainer on transformers' layers can be much faster.
"""


def _declare(side: str, width: int) -> None:
    prefix, goal, floor = _BESIDE[side]

    @case(
        f"end_to_end.{prefix}width_{width}",
        unit="tokens/s",
        goal=goal,
        floor=floor,
        is_default=False,
    )
    def end_to_end(world: World) -> Pair:
        if side == "trl" and importlib.util.find_spec("trl") is None:
            raise SkippedError(
                "TRL is not installed, so there is nothing to compare with. "
                "Run: pip install 'helmsman-rl[bench]'"
            )
        return Pair(
            ours=lambda: _tokens_per_s("helmsman", width),
            floor=lambda: _tokens_per_s(side, width),
            rounds=3,
            returns_figure=True,
            warm_up=0,
        )


def _tokens_per_s(side: str, width: int) -> float:
    """Run one side in its own process, without threads or memory of the other."""
    command = [sys.executable, "-m", "benchmarks.end_to_end", side, str(width)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if ran.returncode:
        raise RuntimeError(
            f"{' '.join(command)} exited with {ran.returncode}:\n{ran.stderr[-3000:]}"
        )
    return float(json.loads(ran.stdout)["tokens_per_s"])


for _side, _width in itertools.product(_BESIDE, (128, 384)):
    _declare(_side, _width)
