"""The accelerator of this process, resolved on first use, and platform kinds as plain data.

``current_platform`` belongs to the process that uses it, which is a worker. A driver needs no
accelerator and never requests one: it reads ``PLATFORMS``, and its scheduler forbids resolution
(``current_platform.forbid``).

``HELMSMAN_PLATFORM`` (cpu, cuda, rocm or npu) is used, or raises an error if it cannot be. Without
it:
CUDA if torch counts a device, then NPU if torch_npu counts one, else CPU. If a mask names devices
but torch counts none, a warning is logged.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from helmsman.api.errors import DeviceMismatchError, PlatformError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

PLATFORM_ENV_VAR = "HELMSMAN_PLATFORM"
_TORCH_COMMAND = "pip install 'helmsman-rl[torch]'"
_TORCH_NPU_COMMAND = "pip install torch_npu (the version that matches torch and CANN)"


class PlatformInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Machine-independent facts about a kind of platform."""

    name: str
    """Key in PLATFORMS, and value of HELMSMAN_PLATFORM."""
    device_type: str
    """Type of its torch.device, and name of its module in torch."""
    visibility_env_var: str
    """Variable with the ids of the devices that a process may see; empty if there is none."""
    ray_resource: str
    """Name of its resource in Ray."""
    communication_backend: str
    """torch.distributed backend for its tensors."""


PLATFORMS: Mapping[str, PlatformInfo] = MappingProxyType(
    {
        name: PlatformInfo(
            name=name,
            device_type=device_type,
            visibility_env_var=mask,
            ray_resource=resource,
            communication_backend=backend,
        )
        for name, device_type, mask, resource, backend in (
            ("cpu", "cpu", "", "CPU", "gloo"),
            ("cuda", "cuda", "CUDA_VISIBLE_DEVICES", "GPU", "nccl"),
            # torch for ROCm calls HIP's devices cuda, and RCCL nccl.
            ("rocm", "cuda", "HIP_VISIBLE_DEVICES", "GPU", "nccl"),
            ("npu", "npu", "ASCEND_RT_VISIBLE_DEVICES", "NPU", "hccl"),
        )
    }
)
"""Schedulers grant a rocm device as cuda: Ray and torch do not distinguish them by name."""

EMPTY_MASKS = frozenset({"", "-1", "none", "void", "nodevfiles"})
"""Values of a visibility variable, in lower case, that hide every device."""


class DeviceGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a scheduler granted to a worker."""

    worker_id: str
    kind: str = ""
    """Key in PLATFORMS; empty if no accelerator was granted."""
    ids: tuple[str, ...] = ()
    """Physical ids, in order."""


def _installed(package: str) -> bool:
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


def _import_torch(what: str) -> Any:
    """Import torch, or raise a PlatformError that names the feature and the install command."""
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError) as exc:  # OSError: a shared library of torch is missing
        raise PlatformError(
            f"{what} needs the package 'torch', which cannot be imported here: {exc}. Install it "
            f"with: {_TORCH_COMMAND}"
        ) from exc


def _runtime_of(info: PlatformInfo) -> Any:
    """Return torch.cuda or torch.npu; torch.npu exists only after torch_npu is imported."""
    torch_module = _import_torch(f"the platform {info.name}")
    if info.name == "npu":
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError) as exc:
            raise PlatformError(
                "the platform npu needs the package 'torch_npu', which cannot be imported here: "
                f"{exc}. Install it with: "
                f"{_TORCH_NPU_COMMAND}"
            ) from exc
    return getattr(torch_module, info.device_type)


def _count_devices(info: PlatformInfo) -> int:
    runtime = _runtime_of(info)
    return int(runtime.device_count()) if runtime.is_available() else 0


def _find_platform(grant: DeviceGrant | None = None) -> PlatformInfo:
    """Determine the platform from HELMSMAN_PLATFORM and torch.

    With a grant, the process must see exactly the granted devices: a worker on the wrong device, or
    on a CPU instead of an accelerator, must not continue. HELMSMAN_PLATFORM=cpu disables this check
    on purpose.

    Raises:
        PlatformError: HELMSMAN_PLATFORM and the machine disagree.
        DeviceMismatchError: The process does not see exactly the granted devices.
    """
    forced = os.environ.get(PLATFORM_ENV_VAR, "").strip().lower()
    if forced:
        found = _forced_platform(forced)
    elif grant is not None and grant.kind:
        # The granted kind is checked even if torch lacks support for it.
        found = PLATFORMS[grant.kind if _count_devices(PLATFORMS[grant.kind]) else "cpu"]
    else:
        found = _counted_platform()
    if grant is not None and forced != "cpu":
        _require_granted(grant, found)
    return found


def _forced_platform(name: str) -> PlatformInfo:
    if name not in PLATFORMS:
        raise PlatformError(
            f"{PLATFORM_ENV_VAR} is {name!r}; set it to one of: {', '.join(PLATFORMS)}."
        )
    info = PLATFORMS[name]
    if name != "cpu" and not _count_devices(info):
        version = _import_torch("it").__version__
        raise PlatformError(
            f"{PLATFORM_ENV_VAR} asks for {name}, but torch {version} counts 0 usable {name} "
            "devices in "
            f"this process (pid {os.getpid()}), under {_mask_of(info)}. Check that torch is a "
            f"build for {name}, that the "
            "device's driver works and that the mask names a device; or set "
            f"{PLATFORM_ENV_VAR}=cpu to run without."
        )
    return info


def _counted_platform() -> PlatformInfo:
    for name, packages in (("cuda", ("torch",)), ("npu", ("torch", "torch_npu"))):
        if all(map(_installed, packages)) and _count_devices(PLATFORMS[name]):
            return PLATFORMS[name]
    for info in PLATFORMS.values():
        if (
            info.visibility_env_var
            and os.environ.get(info.visibility_env_var, "").strip().lower() not in EMPTY_MASKS
        ):
            mask, name = _mask_of(info), info.name
            advice = f"set {PLATFORM_ENV_VAR}={name} to make this an error"
            log.warning(
                "running on cpu although %s: torch counts no %s device here; %s", mask, name, advice
            )
    return PLATFORMS["cpu"]


def _require_granted(grant: DeviceGrant, found: PlatformInfo) -> None:
    granted = PLATFORMS[grant.kind or "cpu"]
    shown = granted if grant.kind else found
    mask = os.environ.get(shown.visibility_env_var) if shown.visibility_env_var else None
    num_devices = 0 if found.name == "cpu" else _count_devices(found)
    torch_version = _import_torch("it").__version__ if _installed("torch") else "(not installed)"
    counted = f"torch {torch_version} counts {num_devices} {shown.name} devices in this process"
    if not num_devices:
        counted += ", which would run on the CPU"
    if found.device_type != granted.device_type:
        step = (
            f"Check that torch is a build for {granted.name} and that its driver works on this "
            "node; set "
            f"{PLATFORM_ENV_VAR}=cpu in SchedulingSpec.env_vars to run on the CPU on purpose"
            if grant.kind
            else "Ask for the devices in SchedulingSpec(gpu=...)"
        )
    elif grant.kind and mask != ",".join(grant.ids):
        step = (
            f"Do not set {granted.visibility_env_var} in env_vars, set_worker_env or the "
            "engine: the scheduler sets it"
        )
    elif grant.kind and num_devices != len(grant.ids):
        step = (
            "Check that these devices exist on the node and that none of them has failed "
            "(nvidia-smi, rocm-smi or npu-smi)"
        )
    else:
        return
    raise DeviceMismatchError(
        where=grant.worker_id,
        granted=f"{grant.kind} {','.join(grant.ids)}".strip(),
        mask=_mask_of(shown) if shown.visibility_env_var else "unset",
        counted=counted,
        step=step,
    )


def _mask_of(info: PlatformInfo) -> str:
    """Format the visibility variable and its value, for a message."""
    value = os.environ.get(info.visibility_env_var)
    return (
        f"{info.visibility_env_var} unset"
        if value is None
        else f"{info.visibility_env_var}={value!r}"
    )


_GIB = float(1 << 30)


class MemoryStats(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a process in bytes, on its current device and on its host.

    Device values are zero on CPU, where torch does not count memory.
    """

    device: str = ""
    """Kind of the device; '' if the process has not used one, as on CPU."""
    allocated_bytes: int = 0
    """Memory of live tensors on the device."""
    reserved_bytes: int = 0
    """Memory reserved on the device, live tensors included."""
    peak_allocated_bytes: int = 0
    """Highest allocated_bytes so far."""
    free_bytes: int = 0
    """Free memory of the device, for any process."""
    total_bytes: int = 0
    """Size of the device's memory."""
    host_bytes: int = 0
    """Resident memory on the host; 0 if only the device was queried."""

    def __str__(self) -> str:
        host = f"{self.host_bytes / _GIB:.2f} GiB on the host"
        if not self.device:
            return f"no device, {host}"
        held = (
            f"{self.allocated_bytes / _GIB:.2f} GiB allocated and "
            f"{self.reserved_bytes / _GIB:.2f} GiB reserved"
        )
        return (
            f"{held} on {self.device} with {self.free_bytes / _GIB:.2f} of "
            f"{self.total_bytes / _GIB:.2f} GiB free, {host}"
        )


class CurrentPlatform:
    """The platform of this process, resolved by the first attribute that needs it and then fixed.

    Only ``is_resolved``, ``expect``, ``seed``, ``forbid``, ``allow`` and ``repr`` do not resolve
    it. A forked child starts unresolved: it must not use the parent's device context or masks.
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

    # --- identity ---------------------------------------------------------------------------------

    @property
    def info(self) -> PlatformInfo:
        """The entry of PLATFORMS for this process.

        Raises:
            PlatformError: Resolution is forbidden, or the platform of HELMSMAN_PLATFORM is
                unavailable.
            DeviceMismatchError: The process does not see exactly the devices that it was granted.
        """
        with self._lock:
            if self._info is None:
                if self._forbidden and not self._num_allowed:
                    raise PlatformError(
                        "the accelerator was used in a process that must not use one (pid "
                        f"{os.getpid()}): "
                        f"{self._forbidden[-1]}. Use current_platform inside an engine, which "
                        "runs in a worker; for static "
                        "facts, such as a kind's visibility variable, read "
                        "helmsman.api.platforms.PLATFORMS."
                    )
                self._info = _find_platform(self._grant)
                self._seed_what_is_loaded()
            return self._info

    def expect(self, grant: DeviceGrant) -> None:
        """Verify on first use that the process sees exactly these devices; touches none itself."""
        with self._lock:
            self._grant = grant

    def is_resolved(self) -> bool:
        """Return whether this process has resolved its platform; does not resolve it."""
        return self._info is not None

    @property
    def name(self) -> str:
        """cpu, cuda, rocm or npu; cuda without HELMSMAN_PLATFORM=rocm."""
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
        """Name of its resource in Ray."""
        return self.info.ray_resource

    @property
    def communication_backend(self) -> str:
        """torch.distributed backend: gloo, nccl or hccl."""
        return self.info.communication_backend

    # --- devices ----------------------------------------------------------------------------------

    def device_count(self) -> int:
        """Devices that this process can use under its mask; 1 on CPU."""
        return 1 if self.name == "cpu" else int(self._runtime().device_count())

    def device(self, local_rank: int = 0) -> torch.device:
        """Return the torch.device at an index into the visible devices, or the CPU device on CPU.

        Raises:
            PlatformError: torch is missing, or counts fewer devices.
        """
        make_device: type[torch.device] = _import_torch("a torch.device").device
        if self.name == "cpu":
            return make_device("cpu")
        num_devices = self.device_count()
        if not 0 <= local_rank < num_devices:
            raise PlatformError(
                f"there is no {self.name} device {local_rank} in this process: torch counts "
                f"{num_devices}, under "
                f"{_mask_of(self.info)}. Use an index below {num_devices}, or ask for more "
                "devices in the job's "
                "SchedulingSpec(gpu=...)."
            )
        return make_device(self.device_type, local_rank)

    def set_device(self, local_rank: int = 0) -> None:
        """Make a visible device the default of this thread; does nothing on CPU.

        Raises:
            PlatformError: torch is missing, or counts fewer devices.
        """
        device = self.device(local_rank)
        if self.name != "cpu":
            self._runtime().set_device(device)

    def synchronize(self) -> None:
        """Wait for all work queued on the current device; does nothing on CPU."""
        if self.name != "cpu":
            self._runtime().synchronize()

    # --- memory and seeds -------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Collect garbage, then return torch's cached memory to the device."""
        gc.collect()
        if self.name != "cpu":
            self._runtime().empty_cache()

    def memory_stats(self) -> MemoryStats:
        """Return the memory of the current device."""
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
        """Seed ``random``, and numpy and torch (all devices) if this process has loaded them.

        Does not resolve the platform, import a library or touch a device, so it may run before the
        masks are set. Resolving the platform later seeds the libraries that it loads. A process
        that imports numpy or torch itself later calls ``seed`` again.
        """
        with self._lock:
            self._seed = seed
            self._seeded = set()
            random.seed(seed)
            self._seed_what_is_loaded()

    def _seed_what_is_loaded(self) -> None:
        """Seed each library once per seed(), so that a stream in use is not reset."""
        if self._seed is None:
            return
        for library, seed_it in _SEEDERS.items():
            if library not in self._seeded and (module := sys.modules.get(library)):
                seed_it(module, self._seed)
                self._seeded.add(library)

    # --- permission -------------------------------------------------------------------------------

    def forbid(self, reason: str) -> contextlib.ExitStack:
        """Make resolution raise PlatformError with this reason until the returned stack closes."""
        self._forbidden.append(reason)
        stack = contextlib.ExitStack()
        stack.callback(self._lift, reason)
        return stack

    def allow(self) -> contextlib.ExitStack:
        """Suspend prohibitions until the returned stack closes, for engines in this process."""
        self._num_allowed += 1
        stack = contextlib.ExitStack()
        stack.callback(self._end_allowance)
        return stack

    def _lift(self, reason: str) -> None:
        with contextlib.suppress(ValueError):  # A forked child has reset the list.
            self._forbidden.remove(reason)

    def _end_allowance(self) -> None:
        self._num_allowed = max(0, self._num_allowed - 1)

    def __reduce__(self) -> str:
        # By name: an engine of __main__ that uses it is sent by value, and finds the worker's own.
        return "current_platform"

    def __repr__(self) -> str:
        return f"<current_platform: {self._info.name if self._info else 'not resolved'}>"

    def _runtime(self) -> Any:
        return _runtime_of(self.info)


_SEEDERS: Mapping[str, Callable[[Any, int], object]] = {
    "numpy": lambda module, seed: module.random.seed(seed % 2**32),
    # Covers accelerators: torch applies the seed to each one when it is initialised.
    "torch": lambda module, seed: module.manual_seed(seed % 2**63),
}

current_platform = CurrentPlatform()
"""The platform of the calling process; a copy in another process is that process's platform."""

# A forked worker must not inherit the driver's resolution, its prohibition, or a lock that another
# thread held.
os.register_at_fork(after_in_child=current_platform._reset)
