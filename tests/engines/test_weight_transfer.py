"""Test sending and receiving weights in one process."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from helmsman.api.weights import (
    CollectiveTarget,
    DeviceTarget,
    DiskTarget,
    MemoryTarget,
    WeightFormat,
    Weights,
    WeightTarget,
)
from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.weight_transfer import incoming, publish

CPU = torch.device("cpu")

ODD: dict[str, torch.Tensor] = {
    "flags": torch.tensor([True, False, True]),
    "wide": torch.arange(5, dtype=torch.float64) / 3,
    "scalar": torch.tensor(7, dtype=torch.int64),
    "none": torch.empty(0, 3),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "byte": torch.tensor([250], dtype=torch.uint8),
    "float": torch.linspace(0, 1, 9),
    "eighth": torch.arange(3).to(torch.float8_e4m3fn),
    "columns": torch.arange(12).reshape(3, 4).t(),
}


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    assert join_process_group(rendezvous_timeout_s=60, collective_timeout_s=60)
    yield
    leave_process_group()


def send(
    tensors: Mapping[str, torch.Tensor],
    target: WeightTarget,
    form: WeightFormat,
    group: WeightGroup,
) -> Any:
    return publish(tensors, target, form, version=target.version, is_root=True, group=group)


def read(weights: Weights, group: WeightGroup) -> dict[str, torch.Tensor]:
    with incoming(weights, group) as arriving:
        found = {name: tensor.clone() for bucket in arriving for name, tensor in bucket.items()}
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
            name: shape for name, shape in arriving.shapes.items() if name in found
        }
    return found


def sockets(
    num_receivers: int, timeout_s: float = 60.0
) -> tuple[list[WeightGroup], list[DeviceTarget]]:
    """Return the groups and targets of a trainer rank, which comes first, and its receivers."""
    groups = [WeightGroup(CPU) for _ in range(1 + num_receivers)]
    names = tuple(f"rollout/{index}" for index in range(num_receivers))
    place = DeviceTarget(
        version=1,
        key="secret",
        sockets=(groups[0].open_socket(),),
        receivers=(names,),
        timeout_s=timeout_s,
    )
    return groups, [place, *(msgspec.structs.replace(place, receiver=name) for name in names)]


def members(
    world_size: int, timeout_s: float = 60.0
) -> tuple[list[WeightGroup], list[CollectiveTarget]]:
    groups = [WeightGroup(CPU) for _ in range(world_size)]
    port = groups[0].open_store("127.0.0.1")
    place = CollectiveTarget(
        version=1,
        group_id="a",
        address="127.0.0.1",
        port=port,
        key="plain:secret",
        rank=0,
        world_size=world_size,
        timeout_s=timeout_s,
    )
    return groups, [msgspec.structs.replace(place, rank=rank) for rank in range(world_size)]


@pytest.mark.parametrize("bucket_bytes", [1, 9, 40, 1 << 40])
@pytest.mark.parametrize("way", ["memory", "disk", "collective", "device"])
def test_incoming_every_dtype_and_bucket_size(way: str, bucket_bytes: int, tmp_path: Path) -> None:
    """Tensors may be unaligned in a bucket, empty, or without dimensions."""
    form = WeightFormat(bucket_bytes=bucket_bytes, checksum=True)
    if way in ("collective", "device"):
        groups: list[WeightGroup]
        places: list[Any]
        if way == "collective":
            groups, places = members(3)
        else:
            groups, places = sockets(2)
        pairs: list[tuple[Any, WeightGroup]] = [*zip(places[1:], groups[1:], strict=True)]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            reading = [threads.submit(read, place, group) for place, group in pairs]
            send(ODD, places[0], form, groups[0])
            arrived = [each.result(60) for each in reading]
        for group in groups:
            group.close()
    else:
        target = (
            MemoryTarget(version=1)
            if way == "memory"
            else DiskTarget(version=1, folder=str(tmp_path))
        )
        group = WeightGroup(CPU)
        arrived = [read(send(ODD, target, form, group), group)]
    for found in arrived:
        with_bytes = {name for name, tensor in ODD.items() if tensor.nbytes}
        assert with_bytes <= found.keys() <= ODD.keys()
        for name in with_bytes:
            assert found[name].dtype is ODD[name].dtype
            assert torch.equal(found[name].float(), ODD[name].float())


def test_incoming_checksum_mismatch() -> None:
    """A mismatch is found before the first bucket in memory, and with its bucket in broadcasts."""
    form = WeightFormat(checksum=True)
    weights = send(ODD, MemoryTarget(version=1), form, WeightGroup(CPU))
    weights.checksums["half"] += 1
    with pytest.raises(
        ValueError,
        match=r"1 of 9 parameters have wrong checksums \(CRC-32\) after the transfer: half",
    ):
        read(weights, WeightGroup(CPU))
    groups, places = members(2)
    values = torch.arange(4, dtype=torch.uint8)
    header = {"shapes": {"w": [4]}, "dtypes": {"w": "uint8"}, "checksums": {"w": 1}, "num_bytes": 4}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        reading = threads.submit(read, places[1], groups[1])
        groups[0].join(places[0])
        groups[0].broadcast_bytes(msgspec.msgpack.encode({"shapes": {"w": [4]}, "bucket_bytes": 4}))
        for _ in range(2):
            groups[0].broadcast_bytes(msgspec.msgpack.encode(header))
            groups[0].broadcast(values)
        groups[0].broadcast_bytes(msgspec.msgpack.encode({"shapes": {}}))
        with pytest.raises(ValueError, match="have wrong checksums"):
            reading.result(60)
        reading = threads.submit(read, places[1], groups[1])
        send({"w": values}, places[0], form, groups[0])
        assert torch.equal(reading.result(60)["w"], values)
    for group in groups:
        group.close()


class _Sizes(WeightGroup):
    """Records the sizes of its broadcasts, in bytes."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.sizes: list[int] = []

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.sizes.append(tensor.nbytes)
        super().broadcast(tensor)


def test_broadcast_large_tensor_in_pieces() -> None:
    """A tensor that exceeds a bucket takes no more memory of a device than a bucket."""
    (first, _), places = members(2)
    second = _Sizes()
    large = torch.arange(10_000, dtype=torch.float32)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        reading = threads.submit(read, places[1], second)
        send({"w": large}, places[0], WeightFormat(bucket_bytes=3000, checksum=True), first)
        assert torch.equal(reading.result(60)["w"], large)
    assert second.sizes.count(3000) == large.nbytes // 3000
    assert max(second.sizes) == 3000
    for group in (first, second):
        group.close()


def test_incoming_files_are_mapped(tmp_path: Path) -> None:
    """The files are mapped, so each rank of an instance reads only its shards."""
    target = DiskTarget(version=1, folder=str(tmp_path))
    stored = send({"w": torch.ones(5, 3)}, target, WeightFormat(), WeightGroup(CPU))
    with incoming(stored, WeightGroup(CPU)) as buckets:
        for bucket in buckets:
            assert _file_at(bucket["w"].data_ptr()).startswith(stored.path)


def _file_at(address: int) -> str:
    """Return the path of the file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split()
        first, end = (int(each, 16) for each in addresses.split("-"))
        if first <= address < end:
            return path
    return ""


def test_publish_bfloat16_keeps_other_types() -> None:
    form = WeightFormat(dtype="bfloat16")
    tensors = {"w": torch.ones(2, 3), "ids": torch.arange(2)}
    sent = send(tensors, MemoryTarget(version=1), form, WeightGroup(CPU))
    assert [each.dtype for each in sent.tensors.values()] == [torch.bfloat16, torch.int64]


def test_publish_removes_versions_of_earlier_runs(tmp_path: Path) -> None:
    """Versions of earlier runs may have higher numbers, since every run restarts its count."""

    def write(version: int) -> None:
        send(
            ODD,
            DiskTarget(version=version, folder=str(tmp_path), num_kept=2),
            WeightFormat(),
            WeightGroup(CPU),
        )

    def there() -> list[int]:
        return sorted(int(path.name.removeprefix("version-")) for path in tmp_path.iterdir())

    for version in (500, 501):
        write(version)
        os.utime(tmp_path / f"version-{version:010d}", (version, version))
    for version, expected in ((1, [1, 501]), (2, [1, 2]), (3, [2, 3])):
        write(version)
        assert there() == expected


def test_incoming_without_room_leaves_group() -> None:
    groups, places = members(2, timeout_s=300.0)
    header = {"shapes": {"w": [1 << 60]}, "dtypes": {"w": "uint8"}, "num_bytes": 1 << 60}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        reading = threads.submit(read, places[1], groups[1])
        groups[0].join(places[0])
        for each in ({"shapes": {"w": [1 << 60]}}, header):
            groups[0].broadcast_bytes(msgspec.msgpack.encode(each))
        with pytest.raises(RuntimeError, match="(?i)alloc"):
            reading.result(120)
        with pytest.raises(ConnectionError, match="(?i)connection"):
            groups[0].broadcast(torch.zeros(1 << 20, dtype=torch.uint8))
    for group in groups:
        group.close()


def test_publish_other_version() -> None:
    with pytest.raises(ValueError, match="weight version 2.*1"):
        publish(
            ODD,
            MemoryTarget(version=1),
            WeightFormat(),
            version=2,
            is_root=True,
            group=WeightGroup(CPU),
        )
