"""Training steps of GRPO from prompts to new weights, beside TRL's GRPOTrainer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

from benchmarks.harness import Pair, SkippedError, case
from benchmarks.world import World

_LIMIT_S = 1200.0


def _declare(width: int) -> None:
    @case(
        f"end_to_end.width_{width}",
        unit="tokens/s",
        goal=">= 1.5",
        floor="TRL's GRPOTrainer: same model, prompts, group size, token limit and cores",
        is_default=False,
    )
    def end_to_end(world: World) -> Pair:
        if importlib.util.find_spec("trl") is None:
            raise SkippedError(
                "TRL is not installed, so there is nothing to compare with. "
                "Run: pip install 'helmsman[bench]'"
            )
        return Pair(
            ours=lambda: _tokens_per_s("helmsman", width),
            floor=lambda: _tokens_per_s("trl", width),
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


for _width in (128, 384):
    _declare(_width)
