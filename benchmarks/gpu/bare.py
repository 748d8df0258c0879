"""The same work as in the checks, in plain torch and transformers: the figures to compare with."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from benchmarks.gpu.harness import Machine
from helmsman import Job

LIMIT_S = 600.0


class CopyTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to copy some bytes between a device and its host."""

    first_to_host: float
    """Into memory that is pinned for it."""
    to_host: float
    """Into memory that is pinned already."""
    to_device: float
    """From pinned memory."""
    on_device: float
    """From one place of the device to another."""


class TrainingSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed and memory of training steps."""

    tokens_per_s: float
    peak_bytes: int


class Bare:
    """Engine that does the work of a check without Helmsman's engines, on the worker's device."""

    def copies(self, num_bytes: int) -> CopyTimes:
        """Time copies of one buffer; those into memory that exists are the best of three."""
        import torch

        from helmsman.api.platforms import current_platform

        device = current_platform.device(0)
        current_platform.set_device(0)
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        other = torch.empty_like(source)
        hosts = []

        def pin_and_copy() -> None:
            pinned = device.type != "cpu"
            hosts.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).copy_(source))

        def seconds(work: Callable[[], object]) -> float:
            current_platform.synchronize()
            started = time.monotonic()
            work()
            current_platform.synchronize()
            return time.monotonic() - started

        first = seconds(pin_and_copy)
        (host,) = hosts
        return CopyTimes(
            first_to_host=first,
            to_host=min(seconds(lambda: host.copy_(source)) for _ in range(3)),
            to_device=min(seconds(lambda: source.copy_(host)) for _ in range(3)),
            on_device=min(seconds(lambda: other.copy_(source)) for _ in range(3)),
        )

    def training(
        self,
        model_config: dict[str, Any],
        samples: Sequence[dict[str, Any]],
        row_length: int,
        variant: str,
    ) -> TrainingSpeed:
        """Train on the tokens of the samples, packed in rows without a mask between them.

        Parameters are float32, computation is bfloat16 by autocast, attention is torch's, and AdamW
        is fused. The tokens beyond the last whole row are left out.

        Args:
            model_config: Entries of a configuration of transformers.
            samples: The samples of a step.
            row_length: Tokens of a row; a micro-batch has at most 16,384 tokens.
            variant: ``plain``, ``recomputed`` (layers are checkpointed) or ``compiled`` (layers).
        """
        import torch
        from torch.utils.checkpoint import checkpoint
        from transformers import AutoConfig, AutoModelForCausalLM

        from helmsman.api.platforms import current_platform

        device = current_platform.device(0)
        current_platform.set_device(0)
        torch.manual_seed(0)
        config = AutoConfig.for_model(**model_config)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model.float().to(device).train()
        for layer in model.model.layers:
            if variant == "recomputed":
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
            if variant == "compiled":
                layer.forward = torch.compile(layer.forward)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        flat = [token for sample in samples for token in sample["input_ids"]]
        num_rows = len(flat) // row_length
        rows = torch.tensor(flat[: num_rows * row_length]).view(num_rows, row_length).to(device)
        micro_batches = rows.split(max(1, 16_384 // row_length))

        def step() -> None:
            for ids in micro_batches:
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    hidden = model.model(ids, use_cache=False)[0]
                    logits = model.lm_head(hidden)
                loss = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
                )
                (loss / rows.numel()).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            current_platform.synchronize()

        for _ in range(2):
            step()
        started = time.monotonic()
        for _ in range(3):
            step()
        return TrainingSpeed(
            tokens_per_s=3 * rows.numel() / (time.monotonic() - started),
            peak_bytes=current_platform.memory_stats().peak_allocated_bytes,
        )


def bare_copies(machine: Machine, num_bytes: int) -> CopyTimes:
    """Time copies of so many bytes, in a fresh worker."""
    found: CopyTimes = _bare(machine, "copies", num_bytes)
    return found


def bare_training(
    machine: Machine, samples: Sequence[dict[str, Any]], row_length: int, variant: str
) -> TrainingSpeed:
    """Measure a bare training loop on one device, in a fresh worker; see Bare.training."""
    found: TrainingSpeed = _bare(machine, "training", machine.model, samples, row_length, variant)
    return found


def _bare(machine: Machine, method: str, *arguments: Any) -> Any:
    scheduler = machine.scheduler
    workers = scheduler.create_workers(Job(role="bare", replicas=1, tasks=[machine.spec()]))
    try:
        asyncio.run(scheduler.create_engine(workers[0], Bare))
        return scheduler.call_engine(workers[0], method, None, *arguments, rpc_timeout=LIMIT_S)
    finally:
        scheduler.delete_workers("bare")
