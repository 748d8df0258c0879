"""Memory of a training state: offload, sleep, and turns with a rollout on the same devices."""

from __future__ import annotations

import asyncio
import time

from benchmarks.gpu.bare import bare_copies
from benchmarks.gpu.harness import Figure, Machine, check
from benchmarks.gpu.training import largest_difference, losses_of, samples_of, training
from helmsman import DeviceHandoff, Job, RolloutController, SamplingParams, SchedulingStrategy
from helmsman.api.platforms import MemoryStats

PROBE = "helmsman.engines.memory.MemoryProbe"
ROLLOUT = "helmsman.engines.rollout.HFRolloutEngine"


@check("memory.offload")
def offload(machine: Machine) -> dict[str, str]:
    """Losses are the same with the optimizer on the host, and with all of the state there."""
    plain = losses_of(machine, machine.num_devices, compute_dtype="float32")
    figures = {}
    for kind in ("optimizer", "all"):
        losses = losses_of(machine, machine.num_devices, compute_dtype="float32", offload=kind)
        difference = largest_difference(losses, plain)
        assert difference < 1e-4, (kind, losses, plain)
        figures[kind] = f"largest relative difference {difference:.1e}"
    return figures


@check("memory.sleep")
def sleep(machine: Machine) -> dict[str, str | Figure]:
    """A trainer that sleeps frees almost all of its device, and continues with the same losses."""
    batch = samples_of(8, 64, machine.model["vocab_size"], 0)
    scheduler = machine.scheduler
    with training(machine, machine.num_devices) as trainer:
        asyncio.run(scheduler.create_engine("train/0", PROBE, "memory"))

        def figures() -> MemoryStats:
            found: MemoryStats = scheduler.call_engine("train/0", "figures", "memory")
            return found

        trainer.train_batch(batch, "sft")
        before, loss = figures(), trainer.eval_batch(batch, "sft")["loss"]
        seconds = []
        for _ in range(2):
            started = time.monotonic()
            trainer.sleep()
            slept, asleep = time.monotonic(), figures()
            began = time.monotonic()
            trainer.wake()
            seconds.append((slept - started, time.monotonic() - began))
        assert trainer.eval_batch(batch, "sft")["loss"] == loss
        assert machine.is_rehearsal or asleep.reserved_bytes < before.reserved_bytes / 4, (
            before,
            asleep,
        )
    # torch counts no memory on the CPU.
    bare = bare_copies(machine, before.allocated_bytes - asleep.allocated_bytes or 2**20)
    (first, _), (again, to_wake) = seconds
    return {
        "allocated awake": f"{before.allocated_bytes / 2**30:.2f} GiB",
        "asleep": f"{asleep.allocated_bytes / 2**30:.2f} GiB allocated, "
        f"{asleep.reserved_bytes / 2**30:.2f} GiB reserved",
        "first sleep": Figure(first, "s", bare.first_to_host),
        "sleep again": Figure(again, "s", bare.to_host),
        "wake again": Figure(to_wake, "s", bare.to_device),
    }


@check("memory.turns")
def turns(machine: Machine) -> dict[str, str]:
    """A trainer and a rollout alternate on the same devices; each token is generated with the
    weights of the previous step.
    """
    model = machine.model
    shared = SchedulingStrategy(type="colocation", target="train", fork=True)
    scheduler = machine.scheduler
    with training(machine, machine.num_devices) as trainer:
        rollout = RolloutController(
            scheduler,
            ROLLOUT,
            Job(
                role="rollout",
                replicas=machine.num_devices,
                tasks=[machine.spec()],
                scheduling_strategy=shared,
            ),
            engine_kwargs={"model": model, "max_concurrency": 8, "max_model_len": 128},
        )
        trainer.sleep()
        with rollout:
            rollout.initialize()
            taking = DeviceHandoff(trainer, rollout)
            seconds = []
            for step in range(3):
                started = time.monotonic()
                taking.to_rollout()
                handed = time.monotonic()
                results = rollout.generate(
                    [[1, 2, 3]] * 8, SamplingParams(max_new_tokens=16, seed=step)
                )
                assert {version for result in results for version in result.versions} == {step}
                began = time.monotonic()
                taking.to_training()
                seconds.append((handed - started, time.monotonic() - began))
                trainer.train_batch(
                    [{"input_ids": [1, 2, 3, *result.token_ids]} for result in results], "sft"
                )
            return {
                "to the rollout": ", ".join(f"{there:.2f} s" for there, _ in seconds),
                "to the trainer": ", ".join(f"{back:.2f} s" for _, back in seconds),
            }
