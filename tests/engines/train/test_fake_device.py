"""Test the calls that engines make to torch on an NPU, recorded by a fake torch_npu."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests import zygote
from tests.engines.preload import PRELOAD

TORCH_NPU = """
import types
import torch
import torch.distributed as dist

calls = []
npu_fusion_attention = None  # imported by transformers

runtime = types.ModuleType("torch.npu")
runtime.is_available = lambda: True
runtime.device_count = lambda: 2
runtime.set_device = lambda device: calls.append(f"set_device {device}")
runtime._is_in_bad_fork = lambda: False
runtime.manual_seed_all = lambda seed: None
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", runtime)


def make_group(store, rank, size, timeout):
    calls.append(f"group by hccl, rank {rank} of {size}")
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("hccl", make_group, devices=["npu"])
"""

SCRIPT = """
import asyncio
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.small_models import LLAMA

engine = FSDPTrainEngine(model=LLAMA)
engine.create_process_group()
engine.create_process_group()
import torch.distributed as dist
import torch_npu
print(*torch_npu.calls, sep="; ")
asyncio.run(engine.abort_collectives("a rank failed"))
print(dist.is_initialized())
"""


def test_process_group_after_set_device(tmp_path: Path) -> None:
    """The device is set before the group is made, since NCCL and HCCL bind a group to the current
    device.
    """
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(TORCH_NPU)
    ran = zygote.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{zygote.ROOT}",
            "HELMSMAN_PLATFORM": "npu",
            "LOCAL_RANK": "1",
        },
        timeout=100,
        preload=PRELOAD,
    )
    assert ran.returncode == 0, ran.stderr
    calls, is_initialized = ran.stdout.splitlines()
    assert calls == "set_device npu:1; group by hccl, rank 0 of 1"
    assert is_initialized == "False", "abort_collectives ends all groups"
