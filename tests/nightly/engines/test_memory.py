"""Test that starts and steps of train engines need less memory than a whole model or its logits."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from helmsman.engines.train import FSDPTrainEngine
from tests.engines.ranks import run_ranks
from tests.engines.small_models import LLAMA

LARGE: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "vocab_size": 32_000,
}
NUM_TOKENS, VOCAB = 4096, 131_072


def memory_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peak_of_a_start(folder: str) -> int:
    """Return the bytes that the start adds at its peak, without pages of files."""
    engine = FSDPTrainEngine(model=folder)
    engine.create_process_group()
    dist.barrier()
    before, peak, ended = memory_bytes("RssAnon"), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.005):
            peak = max(peak, memory_bytes("RssAnon"))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        engine.initialize()
    finally:
        ended.set()
        watching.join()
        engine.destroy()
    return peak - before


def test_start_memory_of_eight_ranks(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LARGE)).bfloat16()
    size = 4 * sum(each.numel() for each in model.parameters())  # the engine trains in float32
    assert size > 0.9 * 2**30
    model.save_pretrained(tmp_path)
    del model
    os.sync()
    total = sum(run_ranks(peak_of_a_start, 8, str(tmp_path)))
    assert total < 1.3 * size, f"8 ranks add {total / size:.2f} of the bytes of their model"


def peak_of_a_step() -> tuple[int, float]:
    """Return the bytes that a step adds at its peak, and its loss."""
    config = {**LLAMA, "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": VOCAB}
    engine = FSDPTrainEngine(model=config, max_tokens_per_micro_batch=NUM_TOKENS, lr=0.0)
    engine.initialize()
    try:
        samples = [{"input_ids": [(7 * each) % VOCAB for each in range(NUM_TOKENS)]}]
        engine.train_batch([{"input_ids": [1, 2, 3]}], "sft")  # makes the optimizer's state
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_bytes("VmRSS")
        loss = engine.train_batch(samples, "sft")["loss"]
        return memory_bytes("VmHWM") - before, loss
    finally:
        engine.destroy()


def test_step_memory_below_the_logits() -> None:
    ((peak, loss),) = run_ranks(peak_of_a_step, 1)
    logits = NUM_TOKENS * VOCAB * 4
    assert peak < 0.6 * logits, f"a step adds {peak / logits:.2f} of the bytes of its logits"
    assert loss > 0
