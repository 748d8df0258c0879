"""Node health checks: ``observe`` collects facts; ``judge`` and ``diagnose`` evaluate them."""

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
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from helmsman.api.environment import masked
from helmsman.api.errors import LauncherError
from helmsman.api.version import __version__
from helmsman.controller._node.devices import detect_devices
from helmsman.controller._node.launchers import ALONE, identify_node
from helmsman.rpc_server._wire.segments import HAS_SEGMENTS, can_reuse

State = Literal["ok", "warn", "bad"]

HEAD_PORTS = (6379, 6380)
"""Default ports of the head: Ray and the supervisor."""

_PACKAGES = ("ray", "torch", "transformers", "vllm")
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
_FILES_WANTED = 65_536
OBJECT_STORE_SHARE = 0.3
"""Share of the available memory that Ray's object store takes; Ray's own rule."""
STORE_LEAST = 80 << 20
"""Minimum size of Ray's object store in bytes, with a reserve."""
MEMORY_BESIDE_STORE = 450 << 20
"""Bytes for Ray's own processes (330 MiB on a head), and the 100 MB for workers that Ray needs to
start.
"""
_TEMP_FREE_WANTED = 10 << 30
SOCKET_PATH_BYTES = 107
"""Maximum length of a socket path."""
RAY_SOCKET_BYTES = len("/ray/session_2026-01-01_00-00-00_000000_1000000/sockets/plasma_store")
"""Length of the longest Ray socket path below Ray's temporary folder."""
_UNLIMITED = 1 << 60


class Check(msgspec.Struct, frozen=True):
    """One row of the doctor's table."""

    name: str
    value: str
    state: State = "ok"
    advice: str = ""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a node. Sizes are in bytes."""

    address: str
    """Local address of the route to the head or the internet; '' without a route."""
    launcher: str
    """Result of identify_node."""
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
        rank: As for identify_node.
        count: As for identify_node.
        head: As for identify_node.
        ports: TCP ports to try to bind.
        environ: Environment variables; those of this process by default.

    Returns:
        The facts.
    """
    environ = os.environ if environ is None else environ
    launcher, launcher_error = "not clear", ""
    try:
        identity = identify_node(environ, rank=rank, count=count, head=head)
    except LauncherError as error:
        launcher_error = str(error)
    else:
        head = identity.head
        launcher = f"{identity.launcher}: node {identity.rank} of {identity.count}" + (
            f", head {head}" if head else ""
        )
        if identity.attach_to:
            launcher = f"{identity.launcher}: {identity.attach_to}"
        elif identity.launcher == ALONE:
            launcher = ALONE
    pool = detect_devices(None, None)
    temp_dir = environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    shm = _space("/dev/shm")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Observed(
        address=address_towards(head or ""),
        launcher=launcher,
        launcher_error=launcher_error,
        versions={"helmsman": __version__, **{name: _version(name) for name in _PACKAGES}},
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


def judge(seen: Observed, *, num_devices: int | None = None) -> list[Check]:
    """Evaluate a node, which should have ``num_devices`` accelerators; None accepts any number."""
    needed, wanted_shm = (
        STORE_LEAST + MEMORY_BESIDE_STORE,
        int(seen.memory_available * OBJECT_STORE_SHARE),
    )
    num_found = len(seen.devices)
    memory = (
        f"Ray does not start with less than {size(needed)}: end other programs (ps aux "
        "--sort=-rss), remove files from "
        "/dev/shm, or raise the limit of the container or the job"
    )
    shm = (
        f"Ray's object store would take {size(wanted_shm)} (30 % of the available memory): "
        "enlarge it (docker --shm-size, an "
        "emptyDir with medium Memory), or what does not fit goes to disk"
    )
    files = f"A head of many nodes needs {_FILES_WANTED}: ulimit -n {_FILES_WANTED}"
    if seen.open_files_hard < _FILES_WANTED:
        files = (
            f"A head of many nodes needs {_FILES_WANTED}: raise the hard limit of "
            f"{seen.open_files_hard} (LimitNOFILE of the "
            "service, docker --ulimit, limits.conf)"
        )
    devices = (
        f"{num_devices} are expected: look at the driver (nvidia-smi, npu-smi), the mask "
        "variable, and what the container was "
        "given"
    )
    cpus = "Less than one CPU is allowed: raise the limit of the container or the job"
    temp = (
        f"Logs and spilled objects go there: name a folder with {size(_TEMP_FREE_WANTED)} by "
        "RAY_TMPDIR"
    )
    ports = (
        "A head cannot listen there: choose another port, or stop the program that holds it "
        "(ss -tlnp)"
    )
    return [
        _check("launcher", seen.launcher, bool(seen.launcher_error), seen.launcher_error, "bad"),
        _address(seen),
        _check("python", seen.python),
        *_versions(seen),
        _check("kernel", seen.kernel),
        _check("cpus", f"{seen.cpus_allowed:g} of {seen.cpus}", seen.cpus_allowed < 1, cpus),
        _check("memory", size(seen.memory)),
        _check(
            "available memory",
            size(seen.memory_available),
            seen.memory_available < needed,
            memory,
            "bad",
        ),
        _check(
            "/dev/shm",
            f"{size(seen.shm_free)} free of {size(seen.shm_total)}",
            seen.shm_free < wanted_shm,
            shm,
        ),
        _check(
            "open files",
            "unlimited" if seen.open_files >= _UNLIMITED else str(seen.open_files),
            seen.open_files < _FILES_WANTED,
            files,
        ),
        _check(
            "accelerators",
            f"{num_found} {seen.device_kind} ({','.join(seen.devices)})" if num_found else "none",
            num_devices not in (None, num_found),
            devices,
            "bad",
        ),
        _check(
            "temp folder",
            f"{seen.temp_dir}, {size(seen.temp_free)} free",
            seen.temp_free < _TEMP_FREE_WANTED,
            temp,
        ),
        *_socket_paths(seen),
        _check(
            "ports",
            "; ".join(f"{port}: {reason}" for port, reason in seen.busy_ports.items())
            or (
                f"{', '.join(map(str, seen.tried_ports))} free"
                if seen.tried_ports
                else "none tried"
            ),
            bool(seen.busy_ports),
            ports,
        ),
        _proxies(seen),
        _SEGMENTS[seen.segments],
    ]


_SEGMENTS = {
    "reused": Check("shared memory", "memfd, used again"),
    "fresh": Check(
        "shared memory",
        "memfd, used once",
        "warn",
        "This kernel grants no leases: large values take several times as long",
    ),
    "none": Check(
        "shared memory",
        "none",
        "warn",
        "Large values are copied through sockets: memfd needs Linux",
    ),
}


def _check(
    name: str, value: str, is_wrong: bool = False, advice: str = "", state: State = "warn"
) -> Check:
    return Check(name, value, state, advice) if is_wrong else Check(name, value)


def _address(seen: Observed) -> Check:
    if not seen.address:
        return Check(
            "address",
            "no route",
            "warn",
            "Runs of several nodes need one: give the network to this container or host",
        )
    advice = "No other host can reach a loopback address: name another by --interface"
    return _check("address", seen.address, seen.address.startswith("127."), advice)


def _versions(seen: Observed) -> list[Check]:
    checks = [Check(name, version) for name, version in seen.versions.items() if version]
    if not seen.versions.get("ray"):
        advice = "Only the local and inline schedulers work: pip install 'helmsman[ray]'"
        checks.append(Check("ray", "not installed", "warn", advice))
    return checks


def _socket_paths(seen: Observed) -> list[Check]:
    length = len(os.fsencode(seen.temp_dir)) + RAY_SOCKET_BYTES
    if length <= SOCKET_PATH_BYTES:
        return []
    advice = (
        f"The system takes {SOCKET_PATH_BYTES}: name a shorter temp folder by RAY_TMPDIR or TMPDIR"
    )
    return [Check("socket paths", f"{length} bytes", "bad", advice)]


def _proxies(seen: Observed) -> Check:
    if not seen.proxies:
        return Check("proxies", "none")
    names = ", ".join(f"{name}={value}" for name, value in seen.proxies.items())
    spared = [each.strip() for each in seen.no_proxy.split(",")]
    if "*" in spared or (seen.address and seen.address in spared):
        return Check("proxies", f"{names}, not for this node")
    advice = (
        "gRPC would send Ray's messages there: put the nodes' addresses in no_proxy, or unset them"
    )
    return Check("proxies", names, "bad", advice)


# --- observation ----------------------------------------------------------------------------------


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


def _version(package: str) -> str:
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
    return _UNLIMITED if value == resource.RLIM_INFINITY else value


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def cpus_allowed(environ: Mapping[str, str]) -> float:
    """Return the number of CPUs allowed by affinity, control group and Slurm's allocation."""
    cpus = float(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
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
    if found := re.search(r"^MemAvailable: +(\d+) kB", _read("/proc/meminfo"), re.MULTILINE):
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
        line.split(":", 2)[1]: line.split(":", 2)[2] for line in _read(own).splitlines()
    }
    for controller, base, limit, used, prefix in (
        ("", root, "memory.max", "memory.current", ""),
        ("memory", f"{root}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        parts = [part for part in paths[controller].split("/") if part]
        for depth in range(len(parts) + 1):
            folder = os.path.join(base, *parts[:depth])
            most, now = _read(f"{folder}/{limit}"), _read(f"{folder}/{used}")
            if most.isdigit() and now.isdigit():
                files = re.findall(
                    rf"^{prefix}(?:in)?active_file (\d+)$",
                    _read(f"{folder}/memory.stat"),
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


MOST_SKEW_S = 1.0
"""Clock difference between nodes above which logs and timeouts are hard to interpret."""

_SAME_EVERYWHERE = ("python", "helmsman", "ray", "torch", "transformers", "vllm")
"""Values that must be equal on all nodes; otherwise the cluster fails at start or later."""
_ADVISED_SAME = ("kernel", "cpus", "memory", "accelerators", "open files", "shared memory")
_RANKS: Mapping[State, int] = {"ok": 0, "warn": 1, "bad": 2}


class Examined(msgspec.Struct, frozen=True):
    node: str
    checks: list[Check]


class Diagnosis(msgspec.Struct, frozen=True):
    nodes: list[Examined]
    between: list[Check]

    @property
    def state(self) -> State:
        checks = [check for node in self.nodes for check in node.checks] + self.between
        return max((check.state for check in checks), key=_RANKS.__getitem__, default="ok")

    def report(self, *, everything: bool = False) -> str:
        """Format the table of a single node, or the failed checks and differences of several."""
        if len(self.nodes) == 1:
            return "\n".join([_table(self.nodes[0].checks), *_advice(self.nodes[0].checks)])
        lines = [f"{len(self.nodes)} nodes"]
        for node in self.nodes:
            shown = [check for check in node.checks if everything or check.state != "ok"]
            lines += [
                "",
                f"{node.node}: {'in order' if not shown else ''}".rstrip(),
                *([_table(shown)] if shown else []),
            ]
            lines += _advice(shown)
        lines += ["", "between the nodes:", _table(self.between), *_advice(self.between)]
        return "\n".join(lines)


def diagnose(
    seen: Mapping[str, Observed],
    *,
    num_devices: int | None = None,
    skews_s: Mapping[str, float] | None = None,
) -> Diagnosis:
    """Evaluate nodes by their facts.

    Args:
        seen: Facts of each node, by name.
        num_devices: Expected accelerators per node; None accepts any number.
        skews_s: Seconds by which each node's clock is ahead of this one's.

    Returns:
        The checks of each node, and between the nodes.
    """
    nodes = [
        Examined(node, judge(observed, num_devices=num_devices)) for node, observed in seen.items()
    ]
    return Diagnosis(nodes, _between(nodes, skews_s or {}) if len(nodes) > 1 else [])


def _between(nodes: Sequence[Examined], skews_s: Mapping[str, float]) -> list[Check]:
    checks = []
    values = {node.node: {check.name: check.value for check in node.checks} for node in nodes}
    for name in (*_SAME_EVERYWHERE, *_ADVISED_SAME):
        found = {node: each.get(name, "not installed") for node, each in values.items()}
        (usual, num_usual), *_ = Counter(found.values()).most_common()
        if num_usual == len(found):
            continue
        others = {
            value: [node for node, own in found.items() if own == value]
            for value in found.values()
            if value != usual
        }
        value = "; ".join(
            [
                f"{usual} on most",
                *(f"{value} on {', '.join(where)}" for value, where in others.items()),
            ]
        )
        if name in _SAME_EVERYWHERE:
            checks.append(Check(name, value, "bad", "Install the same version on every node"))
        else:
            checks.append(
                Check(name, value, "warn", "If this is not intended, check the nodes that differ")
            )
    if skews_s:
        spread = max(skews_s.values()) - min(skews_s.values())
        value, ahead = f"{spread:.2f} s apart", max(skews_s, key=lambda node: skews_s[node])
        if spread > MOST_SKEW_S:
            step = "Let all nodes follow one time server (chronyc tracking)"
            checks.append(Check("clocks", f"{value}, {ahead} is furthest ahead", "warn", step))
        else:
            checks.append(Check("clocks", value))
    return checks or [Check("differences", "none")]


def _table(checks: Sequence[Check]) -> str:
    width = max((len(check.name) for check in checks), default=0)
    marks: Mapping[State, str] = {"ok": "ok  ", "warn": "WARN", "bad": "BAD "}
    return "\n".join(
        f"  {marks[check.state]}  {check.name.ljust(width)}  {check.value}" for check in checks
    )


def _advice(checks: Sequence[Check]) -> list[str]:
    return [
        f"  {check.name}: {check.advice.rstrip('.')}."
        for check in checks
        if check.advice and check.state != "ok"
    ]


def skew_s(observed: Observed, asked_at: float, answered_at: float) -> float:
    """Return the minimum seconds that a node's clock is ahead of this one's.

    The duration of the request limits the precision.
    """
    if asked_at <= observed.clock <= answered_at:
        return 0.0
    return observed.clock - (answered_at if observed.clock > answered_at else asked_at)
