"""Which devices a worker may see: counted by masks and files, given once, never by a driver library."""

from __future__ import annotations

import pytest

from helmsman.api import errors
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


def test_all_workers_or_none() -> None:
    pool = DevicePool("cuda", ["0", "1", "2"])
    assert pool.grant("a", {"a/0": 1, "a/1": 1}) == [("0",), ("1",)]
    with pytest.raises(errors.PlacementTimeoutError, match=r"a/0: 0; a/1: 1"):
        pool.grant("b", {"b/0": 1, "b/1": 1})
    assert pool.held_by("b/0") == ()
    assert pool.share("c/0", "a/1") == ("1",)
    pool.free(["a/0", "a/1", "c/0", "unknown"])
    assert pool.grant("b", {"b/0": 3}) == [("0", "1", "2")]


def test_what_can_never_be_had_and_what_has_no_meaning() -> None:
    pool = DevicePool("npu", ["0"])
    with pytest.raises(errors.PlacementInfeasibleError) as caught:
        pool.grant("a", {"a/0": 2, "a/1": 1})
    assert caught.value.shortfall == "2 accelerators"  # type: ignore[attr-defined]
    with pytest.raises(errors.InvalidSpecError, match=r"gpu is 0\.5; expected a whole number"):
        pool.grant("a", {"a/0": 0.5})
