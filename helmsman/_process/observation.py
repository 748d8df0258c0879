"""Facts about a node: addresses, versions, CPUs, memory, devices, limits and ports."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from helmsman._process.devices import detect_devices
from helmsman._process.guardian import proc_text
from helmsman._process.launchers import identify_node
from helmsman._wire.segments import HAS_SEGMENTS, can_reuse
from helmsman.api.environment import masked
from helmsman.api.errors import LauncherError
from helmsman.api.version import __version__

HEAD_PORTS = (6379, 6380)
"""Default ports of the head: Ray and the supervisor."""

_PACKAGES = ("ray", "torch", "transformers", "vllm")
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
OBJECT_STORE_SHARE = 0.3
"""Share of the available memory that Ray's object store takes; Ray's own rule."""
STORE_LEAST = 80 << 20
"""Minimum size of Ray's object store in bytes, with a reserve."""
MEMORY_BESIDE_STORE = 450 << 20
"""Bytes for Ray's own processes (330 MiB on a head), and the 100 MB for workers that Ray needs to
start.
"""
SOCKET_PATH_BYTES = 107
"""Maximum length of a socket path."""
RAY_SOCKET_BYTES = len("/ray/session_2026-01-01_00-00-00_000000_1000000/sockets/plasma_store")
"""Length of the longest Ray socket path below Ray's temporary folder."""
UNLIMITED = 1 << 60
"""Stands for no limit on file descriptors."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a node. Sizes are in bytes."""

    address: str
    """Local address of the route to the head or the internet; '' without a route."""
    launcher: str
    """Result of identify_node, as text."""
    launcher_error: str = ""
    versions: Mapping[str, str]
    """Package -> version; '' if it is not installed."""
    python: str
    kernel: str
    cpus: int
    """CPUs of the machine."""
    cpus_allowed: float
    """CPUs available to this process by affinity and control group."""
    memory: int
    """Memory of the machine, or the limit of the control group or Slurm."""
    memory_available: int
    """Memory that programs can still allocate: free, or reclaimable by the system."""
    shm_total: int
    shm_free: int
    open_files: int
    """Soft limit on file descriptors."""
    open_files_hard: int
    devices: Sequence[str]
    device_kind: str
    temp_dir: str
    temp_free: int
    busy_ports: Mapping[int, str]
    """Tried ports that cannot be bound, with the reason."""
    tried_ports: Sequence[int]
    proxies: Mapping[str, str]
    """Variables that route gRPC through a proxy; secrets masked."""
    no_proxy: str
    segments: Literal["reused", "fresh", "none"]
    """Whether large values use shared memory, and whether that memory is reused."""
    clock: float


def observe(
    *,
    rank: int | None = None,
    count: int | None = None,
    head: str | None = None,
    ports: Sequence[int] = HEAD_PORTS,
    environ: Mapping[str, str] | None = None,
) -> Observed:
    """Collect facts about this node without starting anything or taking a device.

    Args:
        rank: Value of --node-rank.
        count: Value of --num-nodes.
        head: Value of --head.
        ports: TCP ports to try to bind.
        environ: Environment variables; those of this process by default.

    Returns:
        The facts.
    """
    environ = os.environ if environ is None else environ
    launcher, launcher_error = "not clear", ""
    try:
        identity = identify_node(environ, rank=rank, count=count, head=head)
        launcher, head = str(identity), identity.head
    except LauncherError as error:
        launcher_error = str(error)
    pool = detect_devices(None, None)
    temp_dir = environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    shm = _space("/dev/shm")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Observed(
        address=address_towards(head or ""),
        launcher=launcher,
        launcher_error=launcher_error,
        versions={"helmsman": __version__, **{name: version_of(name) for name in _PACKAGES}},
        python=platform.python_version(),
        kernel=f"{platform.system()} {platform.release()}",
        cpus=os.cpu_count() or 1,
        cpus_allowed=cpus_allowed(environ),
        memory=memory_allowed(environ),
        memory_available=memory_available(environ),
        shm_total=shm[0],
        shm_free=shm[1],
        open_files=_limited(soft),
        open_files_hard=_limited(hard),
        devices=list(pool.ids),
        device_kind=pool.kind,
        temp_dir=temp_dir,
        temp_free=_space(temp_dir)[1],
        busy_ports={
            port: "a program listens there" if number == errno.EADDRINUSE else os.strerror(number)
            for port in ports
            if (number := bind_error(port))
        },
        tried_ports=list(ports),
        proxies={
            name: masked(name, value)
            for name, value in sorted(environ.items())
            if name.lower() in _PROXIES and value
        },
        no_proxy=environ.get("no_proxy") or environ.get("NO_PROXY") or "",
        segments=("reused" if can_reuse() else "fresh") if HAS_SEGMENTS else "none",
        clock=time.time(),
    )


def address_towards(head: str) -> str:
    """Return the local address of the route to the head, or to the internet without a head.

    Prefers IPv4 if the target has both; '' without a route. Sends nothing.
    """
    for target in (head, "192.0.2.1", "2001:db8::1"):
        if not target:
            continue
        try:
            found = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
            family, _, _, _, where = min(found, key=lambda row: row[0] != socket.AF_INET)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)
                address: str = probe.getsockname()[0]
                return address
        except (OSError, UnicodeError):  # UnicodeError: not a valid host name
            continue
    return ""


def version_of(package: str) -> str:
    """Return the version of an installed package; '' without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _space(path: str) -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def _limited(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def cpus_allowed(environ: Mapping[str, str]) -> float:
    """Return the number of CPUs allowed by affinity, control group and Slurm's allocation."""
    cpus = float(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = proc_text("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cpus = min(cpus, int(quota) / int(period))
    allocated = environ.get("SLURM_CPUS_ON_NODE", "")
    return min(cpus, float(allocated)) if allocated.isdecimal() else cpus


def memory_allowed(environ: Mapping[str, str]) -> int:
    """Return the smallest of the machine's memory, the control groups' limits and Slurm's limit.

    In bytes.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = min([total, *(group.limit for group in memory_groups())])
    per_node, per_cpu, cpus = (
        int(text)
        if (text := environ.get(name, "")).isdecimal()
        else 0  # --mem=0 is all of the node
        for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
    )
    allocated = (per_node or per_cpu * cpus) << 20
    return min(allowed, allocated) if allocated else allowed


def memory_available(environ: Mapping[str, str]) -> int:
    """Return the bytes that programs can still allocate on the machine and in control groups."""
    known = [memory_allowed(environ), *(group.limit - group.used for group in memory_groups())]
    if found := re.search(r"^MemAvailable: +(\d+) kB", proc_text("/proc/meminfo"), re.MULTILINE):
        known.append(int(found.group(1)) << 10)
    return max(min(known), 0)


class MemoryGroup(msgspec.Struct, frozen=True):
    limit: int
    used: int
    """Bytes in use without cached files, which the kernel reclaims on demand; as Ray counts."""


def memory_groups(
    own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup"
) -> list[MemoryGroup]:
    """Return the control groups around this process that limit memory, of version 1 and 2.

    ``own`` is the file with the paths of this process's groups below ``root``. A container that
    hides these paths mounts its own group as the root.
    """
    found = []
    paths = {"memory": "/", "": "/"} | {
        line.split(":", 2)[1]: line.split(":", 2)[2] for line in proc_text(own).splitlines()
    }
    for controller, base, limit, used, prefix in (
        ("", root, "memory.max", "memory.current", ""),
        ("memory", f"{root}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        parts = [part for part in paths[controller].split("/") if part]
        for depth in range(len(parts) + 1):
            folder = os.path.join(base, *parts[:depth])
            most, now = (proc_text(f"{folder}/{each}").strip() for each in (limit, used))
            if most.isdigit() and now.isdigit():
                files = re.findall(
                    rf"^{prefix}(?:in)?active_file (\d+)$",
                    proc_text(f"{folder}/memory.stat"),
                    re.MULTILINE,
                )
                found.append(MemoryGroup(int(most), max(int(now) - sum(map(int, files)), 0)))
    return found


def bind_error(port: int) -> int:
    """Return the error number of binding to this port; 0 if it is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno or errno.EADDRNOTAVAIL
    return 0


def size(num_bytes: int) -> str:
    """Format a size: '7.5 GiB'."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes} bytes"


def skew_s(observed: Observed, asked_at: float, answered_at: float) -> float:
    """Return the minimum seconds that a node's clock is ahead of this one's.

    The duration of the request limits the precision.
    """
    if asked_at <= observed.clock <= answered_at:
        return 0.0
    return observed.clock - (answered_at if observed.clock > answered_at else asked_at)
