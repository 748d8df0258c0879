"""Which accelerators a worker may see. No driver library is touched: devices are counted by their files and masks."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from helmsman.api.platform_kinds import PLATFORMS

_DEVICE_FILES = {"cuda": "/dev/nvidia[0-9]*", "npu": "/dev/davinci[0-9]*"}


def visibility(kind: str, ids: Sequence[str]) -> dict[str, str]:
    """The environment with which a process sees just the devices ``ids`` of a kind, and none of the other kinds.

    A process without devices sees none, whatever mask it would have inherited.
    """
    environment = {info.visibility_env_var: "" for info in PLATFORMS.values() if info.visibility_env_var}
    if ids:
        environment[PLATFORMS[kind].visibility_env_var] = ",".join(ids)
    return environment


def detect_devices(num_gpus: int | None, accelerator: str | None) -> DevicePool:
    """The devices that this process may hand out: those of its mask or, without one, of the machine; ``num_gpus`` of them if
    given.

    Where ``num_gpus`` asks for more than were found they are numbered on: logical devices, for tests and dry runs.
    """
    pools = {kind: _found(kind) for kind in ([accelerator] if accelerator else _DEVICE_FILES)}
    kind, ids = next(((kind, ids) for kind, ids in pools.items() if ids), (accelerator or "cuda", []))
    if num_gpus is not None:
        ids = (ids + [str(index) for index in range(num_gpus) if str(index) not in ids])[:num_gpus]
    return DevicePool(kind, ids)


def _found(kind: str) -> list[str]:
    mask = os.environ.get(PLATFORMS[kind].visibility_env_var)
    if mask is None:
        return [str(index) for index in range(len(glob.glob(_DEVICE_FILES[kind])))]
    return [part.strip() for part in mask.split(",") if part.strip() not in ("", "-1")]


class DevicePool:
    """The devices of one machine and who holds them."""

    def __init__(self, kind: str, ids: Sequence[str]) -> None:
        self.kind = kind
        self.ids = tuple(ids)
        self._held: dict[str, tuple[str, ...]] = {}

    def free_ids(self) -> tuple[str, ...]:
        """Devices that nobody holds, in order."""
        taken = {device for ids in self._held.values() for device in ids}
        return tuple(device for device in self.ids if device not in taken)

    def hold(self, worker_id: str, ids: Sequence[str]) -> None:
        """Let a worker have these devices, which are free."""
        self._held[worker_id] = tuple(ids)

    def holders(self) -> list[tuple[str, tuple[str, ...]]]:
        """Who holds devices, and which."""
        return [(worker_id, ids) for worker_id, ids in self._held.items() if ids]

    def free(self, worker_ids: Sequence[str]) -> None:
        """Take back what these workers hold."""
        for worker_id in worker_ids:
            self._held.pop(worker_id, None)

    def environment(self, ids: Sequence[str]) -> dict[str, str]:
        """The visibility variables for a worker that holds ``ids``."""
        return visibility(self.kind, ids)
