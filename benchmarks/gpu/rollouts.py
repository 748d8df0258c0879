"""Checks of rollouts and of weight updates."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.harness import Machine, check
from benchmarks.gpu.training import samples_of, training
from helmsman import Job, RolloutController, SamplingParams, SchedulingStrategy, WeightSync
from helmsman.weights import ViaCollective, ViaDevice, ViaDisk, ViaMemory

HF = "helmsman.engines.rollout.HFRolloutEngine"


@contextlib.contextmanager
def rolling(machine: Machine, **config: Any) -> Iterator[RolloutController]:
    """Yield a ready rollout instance; on a machine with one device, on that of the trainer."""
    beside = machine.num_devices == 1 and bool(machine.scheduler.status())
    strategy = (
        SchedulingStrategy(type="colocation", target="train", fork=True)
        if beside
        else SchedulingStrategy()
    )
    job = Job(role="rollout", replicas=1, tasks=[machine.spec()], scheduling_strategy=strategy)
    known: dict[str, Any] = {
        "model": machine.model,
        "max_model_len": 512,
        "max_concurrency": 64,
        **config,
    }
    rollout = RolloutController(machine.scheduler, HF, job, engine_kwargs=known)
    rollout.initialize()
    try:
        yield rollout
    finally:
        rollout.close()


def prompts_of(machine: Machine, count: int) -> list[list[int]]:
    """Return random prompts."""
    return [
        list(sample["input_ids"])
        for sample in samples_of(count, 64, machine.model["vocab_size"], 1)
    ]


def difference(
    trainer: Any, rollout: RolloutController, prompts: list[list[int]], new_tokens: int
) -> tuple[float, float]:
    """Return the largest and mean absolute difference between rollout and trainer in the
    log-probabilities of sampled tokens.
    """
    results = rollout.generate(prompts, SamplingParams(max_new_tokens=new_tokens, seed=1))
    samples = [
        {"input_ids": prompt + result.token_ids}
        for prompt, result in zip(prompts, results, strict=True)
    ]
    differences = [
        abs(float(theirs) - ours)
        for prompt, result, row in zip(prompts, results, trainer.forward(samples), strict=True)
        for ours, theirs in zip(result.logprobs, row[len(prompt) :], strict=True)
    ]
    return max(differences), sum(differences) / len(differences)


@check("rollouts.speed")
def speed(machine: Machine) -> dict[str, str]:
    """Measure the tokens per second of one HFRolloutEngine in bfloat16, and those of transformers'
    own generation in a process of its own. The second of two runs counts: both prepare kernels.
    """
    prompts, new_tokens = prompts_of(machine, 64), 8 if machine.is_rehearsal else 128
    with rolling(machine, dtype="bfloat16") as rollout:
        for _ in range(2):
            started = time.monotonic()
            results = rollout.generate(prompts, SamplingParams(max_new_tokens=new_tokens))
            rate = sum(len(result.token_ids) for result in results) / (time.monotonic() - started)
    figures = {"requests": "64", "tokens/s": f"{rate:,.0f}"}
    request = {"model": machine.model, "prompts": prompts, "new_tokens": new_tokens}
    bare = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.bare"],
        input=json.dumps(request),
        env={**os.environ, **machine.spec().env_vars},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    ).stdout
    for kind, figure in json.loads(bare.splitlines()[-1]).items():
        figures[f"{kind} generate"] = (
            f"{figure:,.0f}, engine at {rate / figure:.2f} of it" if figure else "not available"
        )
    return figures


@check("rollouts.logprobs")
def logprobs(machine: Machine) -> dict[str, str]:
    """Compare log-probabilities of rollout engine and trainer on the same tokens, in float32."""
    with (
        training(machine, 1, compute_dtype="float32") as trainer,
        rolling(machine, dtype="float32") as rollout,
    ):
        largest, mean = difference(trainer, rollout, prompts_of(machine, 16), 8)
    assert largest < 1e-3, largest
    return {"largest difference": f"{largest:.1e}", "mean": f"{mean:.1e}"}


def of_a_sync(
    trainer: Any,
    rollout: RolloutController,
    way: Any,
    prompts: list[list[int]],
    batch: list[dict[str, Any]],
) -> str:
    """Measure a sync after a step, and check that instance and trainer then agree."""
    sync = WeightSync(trainer, rollout, way)
    sync.push()  # connects, and maps memory
    trainer.train_batch(batch, "sft")
    before, _ = difference(trainer, rollout, prompts, 4)
    report = sync.push()
    largest, _ = difference(trainer, rollout, prompts, 4)
    assert largest < 1e-3 < before, (way, largest, before)
    size, duration = report.num_bytes / 2**20, 1e3 * report.seconds
    return f"{size:.0f} MiB in {duration:.0f} ms, difference {largest:.1e}"


@check("weights.shared_device")
def shared_device(machine: Machine) -> dict[str, str]:
    """Compare syncs on the same devices, by buffers on them and by the host's memory."""
    figures = {}
    prompts, batch = prompts_of(machine, 8), samples_of(4, 64, machine.model["vocab_size"], 2)
    beside = SchedulingStrategy(type="colocation", target="train", fork=True)
    job = Job(
        role="rollout",
        replicas=machine.num_devices,
        tasks=[machine.spec()],
        scheduling_strategy=beside,
    )
    known: dict[str, Any] = {"model": machine.model, "max_model_len": 512, "max_concurrency": 64}
    with (
        training(machine, machine.num_devices, compute_dtype="float32") as trainer,
        RolloutController(
            machine.scheduler, HF, job, engine_kwargs={**known, "dtype": "float32"}
        ) as rollout,
    ):
        way = ViaDevice()
        for name, each in {"device": way, "memory": ViaMemory()}.items():
            figures[name] = of_a_sync(trainer, rollout, each, prompts, batch)
        assert not way.fallback_reason, way.fallback_reason
    return figures


@check("weights.three_ways")
def three_ways(machine: Machine) -> dict[str, str]:
    """Measure a sync after a step by each way, and check that instance and trainer then agree."""
    figures = {}
    prompts, batch = prompts_of(machine, 8), samples_of(4, 64, machine.model["vocab_size"], 2)
    with (
        tempfile.TemporaryDirectory() as folder,
        training(machine, 1, compute_dtype="float32") as trainer,
        rolling(machine, dtype="float32") as rollout,
    ):
        for name, way in {
            "memory": ViaMemory(),
            "collective": ViaCollective(),
            "disk": ViaDisk(folder),
        }.items():
            if name == "collective" and machine.num_devices == 1:
                figures[name] = "needs two devices"  # NCCL refuses two ranks on one device
                continue
            figures[name] = of_a_sync(trainer, rollout, way, prompts, batch)
    return figures
