"""Which devices a worker may see: counted by masks and files, given once, never by a driver library."""

from __future__ import annotations

import pytest

from helmsman.api.errors import DeviceMismatchError
from helmsman.api.platform_kinds import PLATFORMS
from helmsman.controller._node.devices import DevicePool, detect_devices, physical_ids, visibility

CUDA, NPU = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"


def test_a_process_sees_its_own_kind_and_no_other() -> None:
    assert visibility("cuda", ["3", "1"]) == {CUDA: "3,1", NPU: ""}
    assert visibility("npu", ["0"]) == {CUDA: "", NPU: "0"}
    assert visibility("cuda", []) == {CUDA: "", NPU: ""}


@pytest.mark.parametrize(
    ("granted", "raylet_mask", "found"),
    [
        (["5", "4"], "4,5,6,7", [(0, "4"), (1, "5")]),  # physical, as Ray gives them
        (["0", "3"], "4,5,6,7", [(0, "4"), (3, "7")]),  # logical
        (["2", "0"], "7,2,0", [(1, "2"), (2, "0")]),  # physical, in the order of the mask
        (["GPU-b", "GPU-a"], "GPU-a,GPU-b", [(0, "GPU-a"), (1, "GPU-b")]),
        (["1"], "GPU-a, MIG-b", [(1, "MIG-b")]),
        (["10", "9"], None, [(9, "9"), (10, "10")]),
        (["10", "9"], "", [(9, "9"), (10, "10")]),
        ([], "4,5", []),
    ],
)
def test_physical_and_logical_ids_are_told_apart(
    granted: list[str], raylet_mask: str | None, found: list[tuple[int, str]]
) -> None:
    for kind, variable in (("cuda", CUDA), ("npu", NPU)):
        assert physical_ids(kind, granted, raylet_mask) == found
        if raylet_mask:
            assert visibility(kind, granted, raylet_mask)[variable] == ",".join(id_ for _, id_ in found)


def test_ids_that_the_raylet_cannot_have_granted() -> None:
    with pytest.raises(DeviceMismatchError) as caught:
        visibility("cuda", ["6", "8"], "4,5")
    for fact in ("the raylet", "cuda 6,8", "CUDA_VISIBLE_DEVICES='4,5'", "has no such devices"):
        assert fact in str(caught.value)


def test_the_table_of_kinds_is_rays_own() -> None:
    accelerators = pytest.importorskip("ray._private.accelerators", reason="the constants are Ray's")
    for info in PLATFORMS.values():
        if info.visibility_env_var:
            manager = accelerators.get_accelerator_manager_for_resource(info.ray_resource)
            assert manager.get_resource_name() == info.ray_resource
            assert manager.get_visible_accelerator_ids_env_var() == info.visibility_env_var


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
