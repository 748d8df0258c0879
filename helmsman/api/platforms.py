"""The accelerator of this process, behind one object that finds out on first use.

``current_platform`` belongs to the process that uses it, which is a worker. A driver needs no accelerator and never asks for
one: it reads ``PLATFORMS``, which is plain data, and its scheduler forbids the rest (``current_platform.forbid``).

How the kind is found, and what is known of each, is in platform_kinds.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from helmsman.api.errors import PlatformError, PlatformPicklingError
from helmsman.api.platform_kinds import (
    PLATFORM_ENV_VAR,
    PLATFORMS,
    DeviceGrant,
    PlatformInfo,
    find_platform,
    import_torch,
    mask_of,
    runtime_of,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "PLATFORMS",
    "PLATFORM_ENV_VAR",
    "CurrentPlatform",
    "DeviceGrant",
    "MemoryStats",
    "PlatformInfo",
    "current_platform",
]


_GIB = float(1 << 30)


class MemoryStats(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a process in bytes: on its current device, all zero on CPU, where torch does not count, and on its host."""

    device: str = ""
    """Kind of the device; '' where the process has not used one, as on CPU."""
    allocated_bytes: int = 0
    """In its live tensors there."""
    reserved_bytes: int = 0
    """Taken from the device, live tensors included."""
    peak_allocated_bytes: int = 0
    """Highest allocated_bytes so far."""
    free_bytes: int = 0
    """What the device could still give, to any process."""
    total_bytes: int = 0
    """Size of the device."""
    host_bytes: int = 0
    """Resident on the host; 0 where only the device was asked for."""

    def __str__(self) -> str:
        host = f"{self.host_bytes / _GIB:.2f} GiB on the host"
        if not self.device:
            return f"no device, {host}"
        held = f"{self.allocated_bytes / _GIB:.2f} GiB allocated and {self.reserved_bytes / _GIB:.2f} GiB reserved"
        return f"{held} on {self.device} with {self.free_bytes / _GIB:.2f} of {self.total_bytes / _GIB:.2f} GiB free, {host}"


class CurrentPlatform:
    """The platform of this process, resolved by the first attribute that needs it and then fixed.

    Only ``is_resolved``, ``expect``, ``seed``, ``forbid``, ``allow`` and ``repr`` leave it unresolved. A forked child starts
    unresolved: neither the parent's device context nor its masks are the child's.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._info: PlatformInfo | None = None
        self._seed: int | None = None
        self._seeded: set[str] = set()
        self._forbidden: list[str] = []
        self._num_allowed = 0
        self._grant: DeviceGrant | None = None

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> PlatformInfo:
        """The row of PLATFORMS that this process runs on.

        Raises: PlatformError where it is forbidden, or what HELMSMAN_PLATFORM asks for is not there; DeviceMismatchError where
        a worker does not see what it was granted.
        """
        with self._lock:
            if self._info is None:
                if self._forbidden and not self._num_allowed:
                    raise PlatformError(
                        f"the accelerator was asked for in a process that must not use one (pid {os.getpid()}): "
                        f"{self._forbidden[-1]}. Use current_platform inside an engine, which runs in a worker; for static "
                        "facts, such as a kind's visibility variable, read helmsman.api.platforms.PLATFORMS."
                    )
                self._info = find_platform(self._grant)
                self._seed_what_is_loaded()
            return self._info

    def expect(self, grant: DeviceGrant) -> None:
        """Have the first use verify that the process sees just these devices. Touches nothing by itself."""
        with self._lock:
            self._grant = grant

    def is_resolved(self) -> bool:
        """Whether this process has found its platform; does not resolve it."""
        return self._info is not None

    @property
    def name(self) -> str:
        """cpu, cuda or npu."""
        return self.info.name

    @property
    def device_type(self) -> str:
        """Type of its torch.device."""
        return self.info.device_type

    @property
    def visibility_env_var(self) -> str:
        """Variable with the visible device ids; empty on CPU."""
        return self.info.visibility_env_var

    @property
    def ray_resource(self) -> str:
        """Resource under which Ray counts it."""
        return self.info.ray_resource

    @property
    def communication_backend(self) -> str:
        """Backend for torch.distributed: gloo, nccl or hccl."""
        return self.info.communication_backend

    # --- devices ------------------------------------------------------------------------------------------------------

    def device_count(self) -> int:
        """Devices that this process can use under its mask; 1 on CPU."""
        return 1 if self.name == "cpu" else int(self._runtime().device_count())

    def device(self, local_rank: int = 0) -> torch.device:
        """The torch.device at an index into the visible devices, whatever their physical ids; on CPU the one there is.

        Raises: PlatformError when torch is missing, or counts fewer devices.
        """
        make_device: type[torch.device] = import_torch("a torch.device").device
        if self.name == "cpu":
            return make_device("cpu")
        num_devices = self.device_count()
        if not 0 <= local_rank < num_devices:
            raise PlatformError(
                f"there is no {self.name} device {local_rank} in this process: torch counts {num_devices}, under "
                f"{mask_of(self.info)}. Use an index below {num_devices}, or ask for more devices in the job's "
                "SchedulingSpec(gpu=...)."
            )
        return make_device(self.device_type, local_rank)

    def set_device(self, local_rank: int = 0) -> None:
        """Make a visible device the default of this thread; nothing on CPU.

        Raises: PlatformError as device().
        """
        device = self.device(local_rank)
        if self.name != "cpu":
            self._runtime().set_device(device)

    def synchronize(self) -> None:
        """Wait until the current device has finished what was queued; nothing on CPU."""
        if self.name != "cpu":
            self._runtime().synchronize()

    # --- memory and seeds ---------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Collect garbage, then give the memory that torch caches back to the device."""
        gc.collect()
        if self.name != "cpu":
            self._runtime().empty_cache()

    def memory_stats(self) -> MemoryStats:
        """Memory of the current device."""
        if self.name == "cpu":
            return MemoryStats()
        runtime = self._runtime()
        free_bytes, total_bytes = runtime.mem_get_info()
        return MemoryStats(
            device=self.name,
            allocated_bytes=runtime.memory_allocated(),
            reserved_bytes=runtime.memory_reserved(),
            peak_allocated_bytes=runtime.max_memory_allocated(),
            free_bytes=free_bytes,
            total_bytes=total_bytes,
        )

    def seed(self, seed: int) -> None:
        """Seed random, and numpy and torch with all its devices where this process has loaded them.

        Does not resolve the platform, import a library or touch a device, so it may run before the masks are set. What
        resolving loads is seeded then; a process that imports numpy or torch by itself later calls this once more.
        """
        with self._lock:
            self._seed = seed
            self._seeded = set()
            random.seed(seed)
            self._seed_what_is_loaded()

    def _seed_what_is_loaded(self) -> None:
        """Seed each library once per seed(), so that a stream already drawn from is not rewound."""
        if self._seed is None:
            return
        for library, seed_it in _SEEDERS.items():
            if library not in self._seeded and (module := sys.modules.get(library)):
                seed_it(module, self._seed)
                self._seeded.add(library)

    # --- who may use it -----------------------------------------------------------------------------------------------

    def forbid(self, reason: str) -> contextlib.ExitStack:
        """From now until the returned stack is closed, resolving raises PlatformError with this reason."""
        self._forbidden.append(reason)
        stack = contextlib.ExitStack()
        stack.callback(self._lift, reason)
        return stack

    def allow(self) -> contextlib.ExitStack:
        """From now until the returned stack is closed, whatever forbids does not count: engines run in this process."""
        self._num_allowed += 1
        stack = contextlib.ExitStack()
        stack.callback(self._end_allowance)
        return stack

    def _lift(self, reason: str) -> None:
        with contextlib.suppress(ValueError):  # a forked child has forgotten it
            self._forbidden.remove(reason)

    def _end_allowance(self) -> None:
        self._num_allowed = max(0, self._num_allowed - 1)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PlatformPicklingError(name=self._info.name if self._info else "not resolved")

    def __repr__(self) -> str:
        return f"<current_platform: {self._info.name if self._info else 'not resolved'}>"

    def _runtime(self) -> Any:
        return runtime_of(self.info)


_SEEDERS: Mapping[str, Callable[[Any, int], object]] = {
    "numpy": lambda module, seed: module.random.seed(seed % 2**32),
    # Covers the accelerators too: torch keeps the seed for one that is not initialised until it is.
    "torch": lambda module, seed: module.manual_seed(seed % 2**63),
}

current_platform = CurrentPlatform()
"""The platform of the process that reads it. Cannot be pickled; import it where it is used."""

# A driver that forks a worker must hand it neither its resolution nor its prohibition, nor a lock that another thread held.
os.register_at_fork(after_in_child=current_platform._reset)
