"""Which devices a worker may see: counted by masks and files, given once, never by a driver library."""

from __future__ import annotations

import pytest

from helmsman.controller.devices import DevicePool, detect_devices, visibility

CUDA, NPU = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"


def test_a_process_sees_its_own_kind_and_no_other() -> None:
    assert visibility("cuda", ["3", "1"]) == {CUDA: "3,1", NPU: ""}
    assert visibility("npu", ["0"]) == {CUDA: "", NPU: "0"}
    assert visibility("cuda", []) == {CUDA: "", NPU: ""}


@pytest.mark.parametrize(
    ("mask", "num_gpus", "ids"),
    [
        ("4,6", None, ("4", "6")),
        ("4,6", 1, ("4",)),
        ("4,6", 4, ("4", "6", "0", "1")),
        ("", None, ()),
        ("-1", None, ()),
        (" 2 , 3 ", None, ("2", "3")),
        ("GPU-aa,MIG-bb", None, ("GPU-aa", "MIG-bb")),
        (None, 0, ()),
    ],
)
def test_the_mask_of_the_driver_is_what_it_hands_out(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, num_gpus: int | None, ids: tuple[str, ...]
) -> None:
    monkeypatch.delenv(CUDA, raising=False)
    if mask is not None:
        monkeypatch.setenv(CUDA, mask)
    assert detect_devices(num_gpus, "cuda").ids == ids


def test_what_is_held_is_not_free() -> None:
    pool = DevicePool("cuda", ["0", "1", "GPU-2"])
    pool.hold("a/0", ["0"])
    pool.hold("a/1", ["GPU-2"])
    pool.hold("a/2", [])
    assert pool.free_ids() == ("1",)
    assert pool.holders() == [("a/0", ("0",)), ("a/1", ("GPU-2",))]
    pool.free(["a/0", "a/1", "unknown"])
    assert pool.free_ids() == pool.ids
