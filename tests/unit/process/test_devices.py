"""Tests of device masks and DevicePool."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman._process.devices import DevicePool, detect_devices, physical_ids, visibility
from helmsman.api.errors import DeviceMismatchError

CUDA, NPU = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"
HIP, ROCR = "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
KFD = "sys/class/kfd/kfd/topology/nodes"


def test_visibility_shows_only_the_own_kind() -> None:
    """A GPU has the same id for both vendors: vLLM refuses masks of ROCm that differ."""
    assert visibility("cuda", ["3", "1"]) == {CUDA: "3,1", HIP: "3,1", NPU: ""}
    assert visibility("rocm", ["3", "1"]) == {CUDA: "3,1", HIP: "3,1", NPU: ""}
    assert visibility("npu", ["0"]) == {CUDA: "", HIP: "", NPU: "0"}
    assert visibility("cuda", []) == {CUDA: "", HIP: "", NPU: ""}


@pytest.mark.parametrize(("kind", "variable"), [("cuda", CUDA), ("npu", NPU)])
def test_physical_ids(kind: str, variable: str) -> None:
    for granted, raylet_mask, found in [
        (["5", "4"], "4,5,6,7", [(0, "4"), (1, "5")]),  # physical ids of Ray
        (["0", "3"], "4,5,6,7", [(0, "4"), (3, "7")]),  # logical ids
        (["2", "0"], "7,2,0", [(1, "2"), (2, "0")]),  # physical, in the order of the mask
        (["GPU-b", "GPU-a"], "GPU-a,GPU-b", [(0, "GPU-a"), (1, "GPU-b")]),
        (["1"], "GPU-a, MIG-b", [(1, "MIG-b")]),
        (["10", "9"], None, [(9, "9"), (10, "10")]),
        (["10", "9"], "", [(9, "9"), (10, "10")]),
        ([], "4,5", []),
    ]:
        assert physical_ids(kind, granted, raylet_mask) == found
        if raylet_mask:
            assert visibility(kind, granted, raylet_mask)[variable] == ",".join(
                id_ for _, id_ in found
            )


def test_visibility_rejects_ids_outside_the_mask() -> None:
    with pytest.raises(DeviceMismatchError) as caught:
        visibility("cuda", ["6", "8"], "4,5")
    for fact in ("the raylet", "cuda 6,8", "CUDA_VISIBLE_DEVICES='4,5'", "has no such devices"):
        assert fact in str(caught.value)


def test_detect_devices_follows_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUDA, raising=False)
    assert detect_devices(0, "cuda").ids == ()
    for mask, num_gpus, ids in [
        ("4,6", None, "4 6"),
        ("4,6", 1, "4"),
        ("4,6", 4, "4 6 0 1"),
        ("", None, ""),
        ("-1", None, ""),
        (" 2 , 3 ", None, "2 3"),
        ("GPU-aa,MIG-bb", None, "GPU-aa MIG-bb"),
    ]:
        monkeypatch.setenv(CUDA, mask)
        assert detect_devices(num_gpus, "cuda").ids == tuple(ids.split())


@pytest.mark.parametrize(
    ("devices", "masks", "found"),
    [
        ("kfd", {}, "rocm 0 1"),
        ("kfd", {HIP: "1"}, "rocm 1"),
        ("kfd", {CUDA: "1"}, "rocm 1"),
        ("kfd", {HIP: "0", CUDA: "1"}, "rocm 0"),
        ("kfd", {ROCR: "1"}, "rocm 0"),
        ("kfd", {ROCR: "0,1", HIP: "1"}, "rocm 1"),
        ("kfd", {ROCR: ""}, "cuda"),
        ("nvidia0 kfd", {HIP: "1"}, "cuda 0"),
        ("davinci0 davinci1", {}, "npu 0 1"),
        ("davinci0", {CUDA: "3"}, "npu 0"),
        ("", {}, "cuda"),
    ],
)
def test_detect_devices_by_their_files(
    devices: str,
    masks: dict[str, str],
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A staged tree: ROCm's topology has a CPU and two GPUs, and is everywhere with its module."""
    for number, simds in enumerate((0, 440, 440)):
        (tmp_path / KFD / str(number)).mkdir(parents=True)
        properties = f"cpu_cores_count 8\nsimd_count {simds}\nmem_banks_count 1\n"
        (tmp_path / KFD / str(number) / "properties").write_text(properties)
    (tmp_path / KFD / "3" / "properties").mkdir(parents=True)  # outside the container: no reading
    (tmp_path / "dev").mkdir()
    for name in devices.split():
        (tmp_path / "dev" / name).touch()
    for name in (CUDA, HIP, ROCR, NPU):
        monkeypatch.delenv(name, raising=False)
    for name, mask in masks.items():
        monkeypatch.setenv(name, mask)
    pool = detect_devices(None, None, str(tmp_path))
    assert [pool.kind, *pool.ids] == found.split()


def test_device_pool() -> None:
    pool = DevicePool("cuda", ["0", "1", "GPU-2"])
    for worker_id, ids in [("a/0", ["0"]), ("a/1", ["GPU-2"]), ("a/2", [])]:
        pool.hold(worker_id, ids)
    assert pool.free_ids() == ("1",)
    assert pool.holders() == [("a/0", ("0",)), ("a/1", ("GPU-2",))]
    pool.free(["a/0", "a/1", "unknown"])
    assert pool.free_ids() == pool.ids
