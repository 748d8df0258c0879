"""Accelerators visible to a worker, detected by device files and masks without a driver library."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from helmsman.api.errors import DeviceMismatchError
from helmsman.api.platforms import EMPTY_MASKS, PLATFORMS

_DEVICE_FILES = {
    "cuda": "dev/nvidia[0-9]*",
    "rocm": "sys/class/kfd/kfd/topology/nodes/*/properties",
    "npu": "dev/davinci[0-9]*",
}


def visibility(kind: str, granted: Sequence[str], raylet_mask: str | None = None) -> dict[str, str]:
    """Return the environment that restricts a process to its granted devices.

    Devices of other kinds are hidden. A process without devices sees none, regardless of the mask
    that it would inherit. GPUs of either vendor are in the masks of both, with the same ids: below
    an inherited ROCR_VISIBLE_DEVICES, torch ignores CUDA_VISIBLE_DEVICES.

    Args:
        kind: Key of PLATFORMS; any for a process without devices.
        granted: Ids as granted; see physical_ids.
        raylet_mask: Visibility variable of the granting raylet; None if it has none, or if the ids
            are already physical and in order.

    Returns:
        Environment variables by name.

    Raises:
        DeviceMismatchError: The ids are neither in the mask nor positions in it.
    """
    environment = {
        info.visibility_env_var: "" for info in PLATFORMS.values() if info.visibility_env_var
    }
    if granted:
        ids = (
            granted
            if raylet_mask is None
            else [id_ for _, id_ in physical_ids(kind, granted, raylet_mask)]
        )
        for info in PLATFORMS.values():
            if info.ray_resource == PLATFORMS[kind].ray_resource:
                environment[info.visibility_env_var] = ",".join(ids)
    return environment


def physical_ids(
    kind: str, granted: Sequence[str], raylet_mask: str | None
) -> list[tuple[int, str]]:
    """Return (position on the node, physical id) of granted devices, in node order.

    A raylet under a mask such as 4,5,6,7 numbers its devices from 0. Ray maps granted devices back
    to the ids of the mask, in any order and regardless of its NOSET variables
    (tests/nightly/multinode/test_devices.py). Ids that are not in the mask must be such numbers.

    Raises:
        DeviceMismatchError: The ids are neither in the mask nor positions in it.
    """
    listed = split_mask(raylet_mask)
    if not listed:
        numbered = all(map(str.isdecimal, granted))
        return sorted((int(id_), id_) for id_ in granted) if numbered else list(enumerate(granted))
    if all(id_ in listed for id_ in granted):
        return sorted((listed.index(id_), id_) for id_ in granted)
    if all(id_.isdecimal() and int(id_) < len(listed) for id_ in granted):
        return sorted((int(id_), listed[int(id_)]) for id_ in granted)
    raise DeviceMismatchError(
        where="the raylet",
        granted=f"{kind} {','.join(granted)}",
        mask=f"{PLATFORMS[kind].visibility_env_var}={raylet_mask!r}",
        counted="its own mask has no such devices",
        step="Start the node's raylet with the mask that its devices have, or without one",
    )


def split_mask(mask: str | None) -> list[str] | None:
    """Return the ids of a visibility variable; [] if it hides all devices, None if unset."""
    if mask is None:
        return None
    return [part.strip() for part in mask.split(",") if part.strip().lower() not in EMPTY_MASKS]


def detect_devices(num_gpus: int | None, accelerator: str | None, root: str = "/") -> DevicePool:
    """Return the devices that this process may assign: those of its mask, or of the machine.

    With ``num_gpus``, return that many. Missing devices are then logical ones with further numbers,
    for tests and dry runs. Kinds with device files below ``root`` precede kinds with only a mask.
    """
    kinds = [accelerator] if accelerator else list(_DEVICE_FILES)
    counts = {kind: _count(kind, Path(root)) for kind in kinds}
    kinds.sort(key=lambda kind: not counts[kind])
    pools = {kind: _found(kind, counts[kind]) for kind in kinds}
    kind, ids = next(
        ((kind, ids) for kind, ids in pools.items() if ids), (accelerator or "cuda", [])
    )
    if num_gpus is not None:
        ids = (ids + [str(index) for index in range(num_gpus) if str(index) not in ids])[:num_gpus]
    return DevicePool(kind, ids)


def _count(kind: str, root: Path) -> int:
    files = list(root.glob(_DEVICE_FILES[kind]))
    if kind == "rocm":
        return sum(map(_is_gpu, files)) if (root / "dev/kfd").exists() else 0
    return len(files)


def _is_gpu(properties: Path) -> bool:
    """Return whether a node of ROCm's topology is a GPU of this container, and not a CPU."""
    try:
        return re.search(r"^simd_count [1-9]", properties.read_text(), re.MULTILINE) is not None
    except OSError:
        return False


def _found(kind: str, num_files: int) -> list[str]:
    mask = os.environ.get(PLATFORMS[kind].visibility_env_var)
    if kind == "rocm" or (kind == "cuda" and not num_files):
        # ROCm reads CUDA's mask where its own is empty; NVIDIA's driver ignores ROCm's.
        mask = os.environ.get("HIP_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES")
    if kind == "rocm" and (outer := os.environ.get("ROCR_VISIBLE_DEVICES")) is not None:
        num_files = len(split_mask(outer) or ())  # ROCm numbers these from 0.
    listed = split_mask(mask)
    return [str(index) for index in range(num_files)] if listed is None else listed


class DevicePool:
    """The devices of one machine and their holders."""

    def __init__(self, kind: str, ids: Sequence[str]) -> None:
        self.kind = kind
        self.ids = tuple(ids)
        self._held: dict[str, tuple[str, ...]] = {}

    def free_ids(self) -> tuple[str, ...]:
        taken = {device for ids in self._held.values() for device in ids}
        return tuple(device for device in self.ids if device not in taken)

    def hold(self, worker_id: str, ids: Sequence[str]) -> None:
        self._held[worker_id] = tuple(ids)

    def holders(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(worker_id, ids) for worker_id, ids in self._held.items() if ids]

    def free(self, worker_ids: Sequence[str]) -> None:
        for worker_id in worker_ids:
            self._held.pop(worker_id, None)

    def environment(self, ids: Sequence[str]) -> dict[str, str]:
        return visibility(self.kind, ids)
