"""The kinds of platform, as plain data that a driver may read, and how a worker finds out which of them it is on.

``HELMSMAN_PLATFORM`` (cpu, cuda or npu) is obeyed or refused with an error. Without it: CUDA if torch counts a device, then NPU
if torch_npu counts one, else CPU. A mask that names devices of which torch counts none is logged.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from helmsman.api.errors import DeviceMismatchError, PlatformError

log = logging.getLogger(__name__)

PLATFORM_ENV_VAR = "HELMSMAN_PLATFORM"
TORCH_COMMAND = "pip install 'helmsman[torch]'"
TORCH_NPU_COMMAND = "pip install torch_npu (the version that matches torch and CANN)"


class PlatformInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a kind of platform without looking at any machine."""

    name: str
    """Key in PLATFORMS and value of HELMSMAN_PLATFORM."""
    device_type: str
    """Type of its torch.device, and name of its module in torch."""
    visibility_env_var: str
    """Variable that holds the ids of the devices a process may see; empty where there is none."""
    ray_resource: str
    """Resource under which Ray counts it."""
    communication_backend: str
    """Backend of torch.distributed for its tensors."""


PLATFORMS: Mapping[str, PlatformInfo] = MappingProxyType(
    {
        "cpu": PlatformInfo(
            name="cpu", device_type="cpu", visibility_env_var="", ray_resource="CPU", communication_backend="gloo"
        ),
        "cuda": PlatformInfo(
            name="cuda",
            device_type="cuda",
            visibility_env_var="CUDA_VISIBLE_DEVICES",
            ray_resource="GPU",
            communication_backend="nccl",
        ),
        "npu": PlatformInfo(
            name="npu",
            device_type="npu",
            visibility_env_var="ASCEND_RT_VISIBLE_DEVICES",
            ray_resource="NPU",
            communication_backend="hccl",
        ),
    }
)

EMPTY_MASKS = frozenset({"", "-1", "none", "void", "nodevfiles"})
"""Values, in lower case, of a visibility variable that hides every device."""


class DeviceGrant(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler has granted to a worker."""

    worker_id: str
    kind: str = ""
    """Key in PLATFORMS; empty where it was granted no accelerator."""
    ids: tuple[str, ...] = ()
    """Physical ids, in order."""


def _installed(package: str) -> bool:
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


def import_torch(what: str) -> Any:
    """torch, or a PlatformError that says what needed it and how to install it."""
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError) as exc:  # OSError: a shared library of torch is missing
        raise PlatformError(
            f"{what} needs the package 'torch', which cannot be imported here: {exc}. Install it with: {TORCH_COMMAND}"
        ) from exc


def runtime_of(info: PlatformInfo) -> Any:
    """torch.cuda or torch.npu; the second exists only once torch_npu is imported."""
    torch_module = import_torch(f"the platform {info.name}")
    if info.name == "npu":
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError) as exc:
            raise PlatformError(
                f"the platform npu needs the package 'torch_npu', which cannot be imported here: {exc}. Install it with: "
                f"{TORCH_NPU_COMMAND}"
            ) from exc
    return getattr(torch_module, info.device_type)


def _count_devices(info: PlatformInfo) -> int:
    runtime = runtime_of(info)
    return int(runtime.device_count()) if runtime.is_available() else 0


def find_platform(grant: DeviceGrant | None = None) -> PlatformInfo:
    """Look at HELMSMAN_PLATFORM and at this machine through torch; raises PlatformError when they disagree.

    With a grant the process must see just what it was granted, or DeviceMismatchError is raised: a worker on the wrong device,
    or on a CPU where an accelerator was asked for, must not go on. HELMSMAN_PLATFORM=cpu, set on purpose, lifts that.
    """
    forced = os.environ.get(PLATFORM_ENV_VAR, "").strip().lower()
    if forced:
        found = _forced_platform(forced)
    elif grant is not None and grant.kind:  # it is not passed over because torch lacks support for it
        found = PLATFORMS[grant.kind if _count_devices(PLATFORMS[grant.kind]) else "cpu"]
    else:
        found = _counted_platform()
    if grant is not None and forced != "cpu":
        _require_granted(grant, found)
    return found


def _forced_platform(name: str) -> PlatformInfo:
    if name not in PLATFORMS:
        raise PlatformError(f"{PLATFORM_ENV_VAR} is {name!r}; set it to one of: {', '.join(PLATFORMS)}.")
    info = PLATFORMS[name]
    if name != "cpu" and not _count_devices(info):
        raise PlatformError(
            f"{PLATFORM_ENV_VAR} asks for {name}, but torch {import_torch('it').__version__} counts 0 usable {name} devices in "
            f"this process (pid {os.getpid()}), under {mask_of(info)}. Check that torch is a build for {name}, that the "
            f"device's driver works and that the mask names a device; or set {PLATFORM_ENV_VAR}=cpu to run without."
        )
    return info


def _counted_platform() -> PlatformInfo:
    for name, packages in (("cuda", ("torch",)), ("npu", ("torch", "torch_npu"))):
        if all(map(_installed, packages)) and _count_devices(PLATFORMS[name]):
            return PLATFORMS[name]
    for info in PLATFORMS.values():
        if info.visibility_env_var and os.environ.get(info.visibility_env_var, "").strip().lower() not in EMPTY_MASKS:
            mask, name = mask_of(info), info.name
            advice = f"set {PLATFORM_ENV_VAR}={name} to make this an error"
            log.warning("running on cpu although %s: torch counts no %s device here; %s", mask, name, advice)
    return PLATFORMS["cpu"]


def _require_granted(grant: DeviceGrant, found: PlatformInfo) -> None:
    granted = PLATFORMS[grant.kind or "cpu"]
    shown = granted if grant.kind else found
    mask = os.environ.get(shown.visibility_env_var) if shown.visibility_env_var else None
    num_devices = 0 if found.name == "cpu" else _count_devices(found)
    torch_version = import_torch("it").__version__ if _installed("torch") else "(not installed)"
    counted = f"torch {torch_version} counts {num_devices} {shown.name} devices in this process"
    if not num_devices:
        counted += ", which would run on the CPU"
    if found.name != granted.name:
        step = (
            f"Check that torch is a build for {granted.name} and that its driver works on this node; set "
            f"{PLATFORM_ENV_VAR}=cpu in SchedulingSpec.env_vars to run on the CPU on purpose"
            if grant.kind
            else "Ask for the devices in SchedulingSpec(gpu=...)"
        )
    elif grant.kind and mask != ",".join(grant.ids):
        step = f"Do not set {granted.visibility_env_var} in env_vars, set_worker_env or the engine: the scheduler sets it"
    elif grant.kind and num_devices != len(grant.ids):
        step = "Check that these devices exist on the node and that none of them has failed (nvidia-smi or npu-smi)"
    else:
        return
    raise DeviceMismatchError(
        where=grant.worker_id,
        granted=f"{grant.kind} {','.join(grant.ids)}".strip(),
        mask=mask_of(shown) if shown.visibility_env_var else "unset",
        counted=counted,
        step=step,
    )


def mask_of(info: PlatformInfo) -> str:
    """The visibility variable as it stands, for a message."""
    value = os.environ.get(info.visibility_env_var)
    return f"{info.visibility_env_var} unset" if value is None else f"{info.visibility_env_var}={value!r}"
