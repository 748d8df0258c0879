"""Gain of packing in a train engine, and its cost for samples of equal length."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Pair, case
from benchmarks.world import World
from helmsman.api.scheduler import Job, SchedulingSpec

MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
MAX_TOKENS = 2048
"""Tokens of a micro-batch; the samples make four to eight micro-batches."""


def _lengths(kind: str) -> list[int]:
    """Return the lengths of 32 samples: all equal, or most of them short and a few ten times as
    long, like chains of thought.
    """
    draw = random.Random(0)
    return (
        [256] * 32
        if kind == "even"
        else [min(1024, max(16, int(draw.lognormvariate(5.0, 0.9)))) for _ in range(32)]
    )


def _declare(kind: str, goal: str) -> None:
    @case(
        f"packing.{kind}",
        unit="tokens/s",
        goal=goal,
        floor="the same batch sorted by length and padded",
    )
    def packing(world: World) -> Pair:
        from helmsman.controller._training.train_controller import TrainController

        draw = random.Random(1)
        samples = [{"input_ids": draw.choices(range(2048), k=length)} for length in _lengths(kind)]
        num_tokens = sum(_lengths(kind))
        scheduler = world.scheduler("local")

        def engine(role: str, packing: bool) -> Callable[[], float]:
            trainer = TrainController(
                scheduler,
                "helmsman.engines.train.FSDPTrainEngine",
                Job(role=role, replicas=1, tasks=[SchedulingSpec(cpu=0.1)]),
                engine_kwargs={
                    "model": MODEL,
                    "max_tokens_per_micro_batch": MAX_TOKENS,
                    "packing": packing,
                },
            )
            world.until_case_ends.enter_context(trainer)
            trainer.initialize()

            def step() -> float:
                start = time.perf_counter()
                trainer.train_batch(samples, "sft")
                return num_tokens / (time.perf_counter() - start)

            return step

        return Pair(
            ours=engine("packed", True),
            floor=engine("padded", False),
            rounds=7,
            returns_figure=True,
            warm_up=1,
        )


_declare("skewed", ">= 1")
_declare("even", ">= 0.9")
