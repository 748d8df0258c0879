"""Checks of devices and of training."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import random
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.bare import bare_training
from benchmarks.gpu.harness import Figure, Machine, check
from helmsman import Job, TrainController

TRAIN = "helmsman.engines.train.FSDPTrainEngine"
GLOO_TRAIN = "benchmarks.gpu.one_device.GlooTrainEngine"
NUM_STEPS = 5


class Probe:
    """Reports and uses the device of a worker; also as a second engine of a train worker."""

    def peak(self) -> int:
        """Return the peak of allocated memory, in bytes."""
        from helmsman.api.platforms import current_platform

        return current_platform.memory_stats().peak_allocated_bytes

    def device(self) -> dict[str, Any]:
        """Return the device's kind, visible ids and identity, and whether a product computed there
        is right.
        """
        import torch

        from helmsman.api.platforms import current_platform

        device = current_platform.device(0)
        current_platform.set_device(0)
        left, right = (
            torch.arange(64 * 64, device=device).reshape(64, 64).float().remainder(7)
            for _ in range(2)
        )
        product = (left @ right).double().cpu()
        properties = torch.cuda.get_device_properties(0) if device.type == "cuda" else None
        return {
            "kind": device.type,
            "count": current_platform.device_count(),
            "visible": os.environ.get(current_platform.visibility_env_var, "")
            if current_platform.visibility_env_var
            else "",
            "identity": str(getattr(properties, "uuid", "")),
            "is_right": bool(torch.equal(product, (left.double() @ right.double()).cpu())),
        }


@check("devices.binding")
def binding(machine: Machine) -> dict[str, str]:
    """Each worker sees only its own device, and the driver sees none."""
    count = machine.num_devices
    scheduler = machine.scheduler
    workers = scheduler.create_workers(Job(role="probe", replicas=count, tasks=[machine.spec()]))
    try:
        for worker in workers:
            asyncio.run(scheduler.create_engine(worker, Probe))
        found = [
            scheduler.call_engine(worker, "device", None, rpc_timeout=120.0) for worker in workers
        ]
    finally:
        scheduler.delete_workers("probe")
    assert all(each["is_right"] for each in found), found
    if not machine.is_rehearsal:
        assert all(each["count"] == 1 and each["kind"] != "cpu" for each in found), found
        assert len({each["visible"] for each in found}) == count, found
        identities = {each["identity"] for each in found} - {""}
        assert len(identities) in (0, 1 if machine.is_one_device else count), found
    return {
        "workers": str(count),
        "kind": found[0]["kind"],
        "visible ids": ", ".join(each["visible"] or "all" for each in found),
    }


def samples_of(count: int, longest: int, vocab: int, seed: int) -> list[dict[str, Any]]:
    """Return random sequences of skewed lengths."""
    rng = random.Random(seed)
    lengths = [
        max(8, min(longest, int(rng.lognormvariate(math.log(longest / 4), 0.8))))
        for _ in range(count)
    ]
    return [{"input_ids": [rng.randrange(vocab) for _ in range(length)]} for length in lengths]


@contextlib.contextmanager
def training(
    machine: Machine, ranks: int, *, on_host: bool = False, **config: Any
) -> Iterator[Any]:
    """Yield a ready training job."""
    parallel = config.get("tensor_parallel_size", 1) * config.get("context_parallel_size", 1)
    job = Job(role="train", replicas=ranks, tasks=[machine.spec(on_host=on_host)])
    engine: dict[str, Any] = {"model": machine.model, "lr": 1e-3, **config}
    kind = GLOO_TRAIN if machine.is_one_device and ranks > 1 and not on_host else TRAIN
    trainer = TrainController(
        machine.scheduler, kind, job, engine_kwargs=engine, model_parallel_size=parallel
    )
    trainer.initialize()
    try:
        yield trainer
    finally:
        trainer.close()


def losses_of(machine: Machine, ranks: int, *, on_host: bool = False, **config: Any) -> list[float]:
    """Return the losses of some steps on the same batches, for any number of ranks."""
    longest = 64
    with training(machine, ranks, on_host=on_host, **config) as trainer:
        return [
            float(
                trainer.train_batch(
                    samples_of(8, longest, machine.model["vocab_size"], seed), "sft"
                )["loss"]
            )
            for seed in range(NUM_STEPS)
        ]


def largest_difference(left: list[float], right: list[float]) -> float:
    """Return the largest relative difference of two series of losses."""
    return max(abs(one - other) / abs(other) for one, other in zip(left, right, strict=True))


@check("training.same_losses_as_the_host")
def same_losses(machine: Machine) -> dict[str, str]:
    """Compare losses on the devices, in float32 and in bfloat16, with one rank on the host in
    float32.
    """
    floor = losses_of(machine, 1, on_host=True, compute_dtype="float32")
    exact = largest_difference(
        losses_of(machine, machine.num_devices, compute_dtype="float32"), floor
    )
    half = largest_difference(
        losses_of(machine, machine.num_devices, compute_dtype="bfloat16"), floor
    )
    assert exact < 1e-3, (exact, floor)
    assert half < 3e-2, (half, floor)
    return {
        "ranks": str(machine.num_devices),
        "largest relative difference in float32": f"{exact:.1e}",
        "in bfloat16": f"{half:.1e}",
    }


_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"gradient_checkpointing": True},
    "compiled": {"compile_layers": True},
}


def speed(machine: Machine, variant: str) -> dict[str, Figure]:
    """Measure tokens per second and peak memory of a step in bfloat16, beside a bare loop."""
    machine.require_own_devices("a speed")
    count, longest = (8, 64) if machine.is_rehearsal else (64, 2048)
    batch = samples_of(count, longest, machine.model["vocab_size"], 0)
    tokens = sum(len(sample["input_ids"]) for sample in batch)
    config = {"compute_dtype": "bfloat16", **_VARIANTS[variant]}
    with training(machine, machine.num_devices, **config) as trainer:
        asyncio.run(machine.scheduler.create_engine("train/0", Probe, "probe"))
        for _ in range(2):
            trainer.train_batch(batch, "sft")
        started = time.monotonic()
        for _ in range(3):
            trainer.train_batch(batch, "sft")
        rate = 3 * tokens / (time.monotonic() - started) / machine.num_devices
        peak = machine.scheduler.call_engine("train/0", "peak", "probe")
    bare = bare_training(machine, batch, longest, variant)
    return {
        "of a device": Figure(rate, "tokens/s", bare.tokens_per_s),
        "peak": Figure(peak / 2**30, "GiB", bare.peak_bytes / 2**30),
    }


for _variant in _VARIANTS:
    check(f"training.speed_and_memory.{_variant}")(functools.partial(speed, variant=_variant))
