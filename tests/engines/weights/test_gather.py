"""Test the gathering of parameters: its values, and the bytes and collectives that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines._weights.gathering import gather
from helmsman.engines._weights.host_swap import HostSwap
from helmsman.engines._weights.sending import Bucket, Packer, Sink, send_all
from tests.engines.ranks import run_ranks


class _Gathers(TorchDispatchMode):
    """Counts the bytes that this rank contributes, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "all_gather_into_tensor" in name or "_allgather_base_" in name:
            given = args[0] if "all_gather" in name else args[1]
            self.num_bytes[given.dtype] = self.num_bytes.get(given.dtype, 0) + given.nbytes
        return func(*args, **(kwargs or {}))


def divide(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return this rank's part of a tensor; tensor-parallel shards are divided before FSDP's."""
    part = whole
    for axis in sorted(range(mesh.ndim), key=lambda a: isinstance(placements[a], _StridedShard)):
        placement = placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            chunks = list(part.chunk(mesh.size(axis), placement.dim))
            nothing = part.narrow(placement.dim, 0, 0)
            chunks += [nothing] * (mesh.size(axis) - len(chunks))
            part = chunks[mesh.get_local_rank(axis)]
    return DTensor.from_local(
        part.clone(), mesh, placements, shape=whole.shape, stride=whole.contiguous().stride()
    )


ROW, COLUMN, COPY = Shard(0), Shard(1), Replicate()
TENSOR_ROWS = _StridedShard(0, split_factor=2)
LAYOUTS: dict[int, tuple[tuple[int, ...], list[list[Placement]]]] = {
    # Mesh and placements: FSDP, and with four ranks FSDP or replicas by tensor-parallel ranks.
    2: ((2,), [[ROW], [COLUMN], [COPY]]),
    4: ((4,), [[ROW], [COLUMN], [COPY]]),
    22: (
        (2, 2),
        [[ROW, COPY], [COPY, ROW], [ROW, COLUMN], [COLUMN, ROW], [ROW, ROW], [TENSOR_ROWS, ROW]],
    ),
}
SHAPES = [(8, 4), (5, 3), (1, 2), (7, 1), (3, 5, 2)]


def one_by_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered_on(layout: int) -> dict[str, Any]:
    join_process_group(rendezvous_timeout_s=60, collective_timeout_s=60)
    sizes, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", sizes)
    torch.manual_seed(0)
    wholes = [torch.randn(shape) for shape in SHAPES for _ in placements]
    shards = [
        divide(whole, mesh, placements[index % len(placements)])
        for index, whole in enumerate(wholes)
    ]
    counted = DTensor.from_local(torch.arange(6), mesh, [COPY] * mesh.ndim)
    summed = DTensor.from_local(torch.ones(3), mesh, [Partial()] * mesh.ndim)
    tensors = [*shards, counted, summed, torch.ones(3)]
    found: dict[str, Any] = {}
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        with _Gathers() as gathers:
            results = list(gather(tensors, dtype))
        expected = [one_by_one(tensor) for tensor in tensors]
        found[name] = [
            torch.equal(mine, theirs.to(mine.dtype)) and mine.is_contiguous()
            for mine, theirs in zip(results, expected, strict=True)
        ]
        found[name] += [
            mine.dtype is (dtype or torch.float32) and torch.equal(mine, whole.to(mine.dtype))
            for mine, whole in zip(results, wholes, strict=False)
        ]
        assert results[-3].dtype is torch.int64
        found[f"{name} bytes"] = sum(gathers.num_bytes.values())
        found[f"{name} types"] = set(gathers.num_bytes)
    leave_process_group()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_equals_one_by_one(layout: int) -> None:
    """Uneven and empty shards, replicas, tensor-parallel shards, and layouts of other kinds."""
    for found in run_ranks(gathered_on, min(layout, 4), layout):
        assert all(found["float32"])
        assert all(found["bfloat16"])
        assert found["float32 bytes"] == 2 * found["bfloat16 bytes"] > 0
        assert found["bfloat16 types"] == {torch.bfloat16}


def num_gathers_on(world_size: int) -> tuple[int, int]:
    join_process_group(rendezvous_timeout_s=60, collective_timeout_s=60)
    layer = nn.TransformerEncoderLayer(8, 2, 17)
    mesh = init_device_mesh("cpu", (world_size,))
    shards = [divide(each.detach(), mesh, [ROW]) for each in layer.parameters()]
    with CommDebugMode() as together:
        list(gather(shards))
    with CommDebugMode() as alone:
        for shard in shards:
            list(gather([shard]))
    leave_process_group()
    return together.get_total_counts(), alone.get_total_counts()


@pytest.mark.parametrize("world_size", [2, 4])
def test_gather_one_collective_per_layer(world_size: int) -> None:
    assert run_ranks(num_gathers_on, world_size, world_size) == [(1, 12)] * world_size


# --- with collectives that return at once ---------------------------------------------------------


@pytest.fixture
def four_ranks() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("num_tensors", [1, 2])
def test_gather_of_released_memory(four_ranks: DeviceMesh, num_tensors: int) -> None:
    """While the trainer sleeps, only one shard at a time has memory."""
    shards = [DTensor.from_local(torch.ones(2), four_ranks, [ROW]) for _ in range(num_tensors)]
    plain = torch.full((3,), 2.0)
    swap = HostSwap()
    swap.offload([*shards, plain])
    *wholes, own = gather([*shards, plain], present=swap.present)
    assert all(shard.to_local().untyped_storage().nbytes() == 0 for shard in shards)
    assert [whole.shape for whole in wholes] == [(8,)] * num_tensors
    assert torch.equal(own, torch.full((3,), 2.0))


class _Names(Sink[list[str]]):
    def __init__(self) -> None:
        self.names: list[str] = []

    def put(self, bucket: Bucket) -> None:
        self.names += bucket.tensors

    def finish(self) -> list[str]:
        return self.names


def test_send_all_batches_of_bucket_bytes() -> None:
    """A batch has as many tensors as fit into a bucket in the type in which they are sent."""
    batches: list[int] = []

    def recorded(
        tensors: Sequence[torch.Tensor], dtype: torch.dtype | None
    ) -> Iterator[torch.Tensor]:
        batches.append(len(tensors))
        return gather(tensors, dtype)

    pack: Callable[[Any], Packer[list[str]]] = lambda stack: Packer(_Names(), 16)  # noqa: E731
    tensors = {f"w{number}": torch.ones(3) for number in range(5)} | {"large": torch.ones(100)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        sent = send_all(tensors, recorded, torch.bfloat16, 16, pack, "sending")
    finally:
        dist.destroy_process_group()
    assert sent == list(tensors)
    assert batches == [2, 2, 1, 1]
