"""Train with options of FSDP's communication on several ranks, and count collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.small_models import LLAMA, random_tokens

MODEL = {**LLAMA, "num_hidden_layers": 3}
SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (9, 9, 9, 9, 9, 9, 9, 9)]
NUM_UNITS = 1 + MODEL["num_hidden_layers"]
"""Groups of parameters that FSDP gathers at once: one per layer, and the rest of the model."""
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "kept after backward": {"reshard_after_backward": False},
    "kept": {"reshard_after_backward": False, "reshard_after_forward": False},
    "prefetched": {"num_prefetched_layers": 2},
    "bfloat16 sums": {"reduce_dtype": "bfloat16"},
}


class Collectives(TorchDispatchMode):
    """Counts collectives by torch's name of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
            if func.overloadpacket.__name__ == "_allgather_base_":
                self.order.append("gather")
        return func(*args, **(kwargs or {}))


def train(fields: dict[str, Any], budget: int) -> dict[str, Any]:
    """Train three steps, with an error before the last one, and count collectives."""
    engine = FSDPTrainEngine(model=MODEL, lr=1e-3, max_tokens_per_micro_batch=budget, **fields)
    engine.initialize()
    mine = SAMPLES[engine.data_parallel_rank :: engine.data_parallel_world_size]
    steps = [engine.train_batch(mine, "sft")]
    with Collectives() as counted:
        steps.append(engine.train_batch(mine, "sft"))
    if budget < len(SAMPLES) * 9:
        with pytest.raises(ArithmeticError, match="in a pass"), failing_backward(engine):
            engine.train_batch(mine, "sft")
    steps.append(engine.train_batch(mine, "sft"))
    layers = layers_of(engine)
    with Collectives() as in_order:
        order = in_order.order
        hooks = [
            layer.register_forward_pre_hook(lambda *_, n=n: order.append(f"layer {n}"))
            for n, layer in enumerate(layers)
        ]
        engine.eval_batch(mine[:1], "sft")
    for hook in hooks:
        hook.remove()
    weights = engine.export_weights()
    engine.destroy()
    return {"steps": steps, "weights": weights, "counts": counted.counts, "order": order}


def layers_of(engine: FSDPTrainEngine) -> list[torch.nn.Module]:
    model: Any = engine._built_model()
    return list(model.model.layers)


@contextmanager
def failing_backward(engine: FSDPTrainEngine) -> Iterator[None]:
    """Fail in the second backward pass, on all ranks, after some layers have gradients."""
    first = layers_of(engine)[0]
    num = 0

    def fail(*_: Any) -> None:
        nonlocal num
        num += 1
        if num == 2:
            raise ArithmeticError("in a pass")

    hook = first.register_full_backward_hook(fail)
    yield
    hook.remove()


def all_cases(num_replicas: int) -> dict[str, Any]:
    join_process_group(rendezvous_timeout_s=60, collective_timeout_s=60)
    fields = {"data_parallel_replicas": num_replicas}
    found = {name: train({**fields, **each}, budget=9) for name, each in CASES.items()}
    found["one micro-batch"] = train(fields, budget=1000)
    leave_process_group()
    return found


def require_same_losses(found: dict[str, Any]) -> None:
    """Check that each case has the losses and weights of one micro-batch."""
    expected = found["one micro-batch"]
    for name in CASES:
        is_rounded = name == "bfloat16 sums"
        tolerance = 2e-2 if is_rounded else 1e-5
        for mine, theirs in zip(found[name]["steps"], expected["steps"], strict=True):
            assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance), name
        for key, weight in found[name]["weights"].items():
            atol = 1e-2 if is_rounded else 1e-4
            torch.testing.assert_close(weight, expected["weights"][key], atol=atol, rtol=0)
