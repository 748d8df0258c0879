"""Counts of the kernel's OOM kills, which distinguish its SIGKILL from others."""

from __future__ import annotations

from pathlib import Path

import msgspec

_CGROUPS = Path("/sys/fs/cgroup")
_MACHINE = "/proc/vmstat"


class OomCount(msgspec.Struct, frozen=True):
    """Number of OOM kills up to one time, in a cgroup or on the whole machine."""

    path: str
    """File that holds the count, readable by any process of the same machine."""
    num_kills: int


def oom_count(pid: int | str = "self") -> OomCount | None:
    """Return the OOM kills so far in the memory cgroup of a process, else of the machine.

    Returns None if the kernel keeps no count.
    """
    for path in (*_cgroup_files(pid), _MACHINE):
        if (num_kills := _read(path)) is not None:
            return OomCount(path, num_kills)
    return None


def oom_kills_since(before: OomCount | None) -> int:
    now = None if before is None else _read(before.path)
    return 0 if before is None or now is None else max(0, now - before.num_kills)


def _cgroup_files(pid: int | str) -> list[str]:
    """Return candidate files of the count: for cgroups v2, alone or beside v1, and for v1."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, group = line.split(":", 2)
        # A container sees its group as the root, or its path on the host, which is absent inside.
        inside = group.lstrip("/")
        if number == "0" and not controllers:
            found += [_CGROUPS / inside / "memory.events", _CGROUPS / "memory.events"]
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            found += [root / inside / "memory.oom_control", root / "memory.oom_control"]
    return [str(path) for path in found]


def _read(path: str) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next(
        (
            int(value)
            for name, _, value in (line.partition(" ") for line in lines)
            if name == "oom_kill"
        ),
        None,
    )
