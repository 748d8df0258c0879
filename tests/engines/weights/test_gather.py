"""What ranks exchange when a parameter is gathered, by collectives that return at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from helmsman.engines._models.distributed import full_tensor


@pytest.fixture
def four_ranks() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


class _Gathers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather_into_tensor" in str(func):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_full_tensor_cast_before_gather(four_ranks: DeviceMesh) -> None:
    weight = DTensor.from_local(torch.ones(2, 3), four_ranks, [Shard(0)])
    ids = DTensor.from_local(torch.arange(2), four_ranks, [Shard(0)])
    with _Gathers() as gathers:
        wholes = [full_tensor(each, torch.bfloat16) for each in (weight, ids)]
        full_tensor(weight)
    assert gathers.dtypes == [torch.bfloat16, torch.int64, torch.float32]
    assert [(each.dtype, each.shape) for each in wholes] == [
        (torch.bfloat16, (8, 3)),
        (torch.int64, (8,)),
    ]
