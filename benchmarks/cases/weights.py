"""Transfer of weights from one worker to another, without the script."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from benchmarks.engines import Weights
from benchmarks.harness import Pair, case
from benchmarks.world import World
from helmsman.api.scheduler import Job, SchedulingSpec

NUM_TENSORS = 64
TENSOR_BYTES = 1 << 20


def _declare(backend: str) -> None:
    @case(
        f"weights.{backend}.64MB", unit="ms", floor="copying the same state dict within one process"
    )
    def sync(world: World) -> Pair:
        scheduler = world.scheduler(backend)
        source, target = scheduler.create_workers(
            Job(role="weights", replicas=2, tasks=[SchedulingSpec(cpu=0.1)])
        )
        world.until_case_ends.callback(scheduler.delete_workers, "weights")

        async def equip() -> None:
            await asyncio.gather(
                *(
                    scheduler.create_engine(worker, Weights, "model", NUM_TENSORS, TENSOR_BYTES)
                    for worker in (source, target)
                )
            )

        world.run(equip())
        ours, theirs = Weights(NUM_TENSORS, TENSOR_BYTES), Weights(NUM_TENSORS, TENSOR_BYTES)

        def past_the_script() -> None:
            handle = scheduler.call_engine(source, "export", "model", rpc_meta={"keep": True})
            scheduler.call_engine(target, "load", "model", handle)
            scheduler.release(handle)

        return Pair(
            ours=past_the_script, floor=lambda: theirs.load(ours.export()), rounds=9, warm_up=2
        )


for _backend in ("local", "ray"):
    _declare(_backend)


# --- a trainer's weights to rollout instances -----------------------------------------------------

NUM_INSTANCES = 4
MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
"""About 125 million parameters, 500 MB in float32."""


def _declare_sync(backend: str, way: str) -> None:
    @case(
        f"weight_sync.{backend}.{way}.500MB",
        unit="ms",
        floor="one memcpy of the same bytes within one process",
        is_default=(backend, way) != ("ray", "collective"),
    )
    def sync(world: World) -> Pair:
        import torch

        from helmsman.controller._rollout.rollout_controller import RolloutController
        from helmsman.controller._training.train_controller import TrainController
        from helmsman.controller._weights.sync import WeightSync
        from helmsman.controller._weights.transport import ViaDisk, ViaMemory
        from helmsman.controller._weights.via_collective import ViaCollective

        scheduler = world.scheduler(backend)
        spec = SchedulingSpec(cpu=0.1)
        trainer = TrainController(
            scheduler,
            "helmsman.engines.train.FSDPTrainEngine",
            Job(role="sync-train", replicas=1, tasks=[spec]),
            engine_kwargs={"model": MODEL},
        )
        rollout = RolloutController(
            scheduler,
            "helmsman.engines.rollout.HFRolloutEngine",
            Job(role="sync-rollout", replicas=NUM_INSTANCES, tasks=[spec]),
            engine_kwargs={"model": MODEL, "max_concurrency": 1, "max_model_len": 8},
        )
        for each in (trainer, rollout):
            world.until_case_ends.callback(each.close)
            each.initialize()
        folder = world.until_case_ends.enter_context(
            tempfile.TemporaryDirectory(prefix="helmsman-bench-")
        )
        carrier = (
            {"memory": ViaMemory, "collective": ViaCollective}[way]()
            if way != "disk"
            else ViaDisk(folder, num_kept=1)
        )
        weights = WeightSync(trainer, rollout, carrier)
        source = torch.rand(weights.push().num_bytes // 4)
        target = torch.empty_like(source)
        return Pair(ours=weights.push, floor=lambda: target.copy_(source), rounds=9, warm_up=2)


for _backend in ("local", "ray"):
    for _way in ("memory", "collective", "disk"):
        _declare_sync(_backend, _way)
