"""Node health checks: ``judge`` and ``diagnose`` evaluate the facts of ``observe``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from helmsman._process.observation import (
    MEMORY_BESIDE_STORE,
    OBJECT_STORE_SHARE,
    RAY_SOCKET_BYTES,
    SOCKET_PATH_BYTES,
    STORE_LEAST,
    UNLIMITED,
    Observed,
    size,
)
from helmsman.api.plan import aligned

State = Literal["ok", "warn", "bad"]

_MARKS: Mapping[State, str] = {"ok": "ok", "warn": "WARN", "bad": "BAD"}
"""Marks by state, the worst last."""
_MEMORY_NEEDED = STORE_LEAST + MEMORY_BESIDE_STORE
_FILES_WANTED = 65_536
_TEMP_FREE_WANTED = 10 << 30
MOST_SKEW_S = 1.0
"""Clock difference between nodes above which logs and timeouts are hard to interpret."""

_ADVICE: Mapping[str, str] = {
    "launcher": "{seen.launcher_error}",
    "address": "Runs of several nodes need one: give the network to this container or host",
    "address: loopback": "No other host can reach a loopback address: name another by --interface",
    "ray": "Only the local and inline schedulers work: pip install 'helmsman-rl[ray]'",
    "cpus": "Less than one CPU is allowed: raise the limit of the container or the job",
    "available memory": f"Ray does not start with less than {size(_MEMORY_NEEDED)}: end other "
    "programs (ps aux --sort=-rss), remove files from /dev/shm, or raise the limit of the "
    "container or the job",
    "/dev/shm": "Ray's object store would take {store} (30 % of the available memory): enlarge it "
    "(docker --shm-size, an emptyDir with medium Memory), or objects that do not fit spill to disk",
    "open files: hard": f"A head of many nodes needs {_FILES_WANTED}: raise the hard limit of "
    "{seen.open_files_hard} (LimitNOFILE of the service, docker --ulimit, limits.conf)",
    "open files": f"A head of many nodes needs {_FILES_WANTED}: ulimit -n {_FILES_WANTED}",
    "accelerators": "{num_devices} are expected: check the driver (nvidia-smi, rocm-smi, npu-smi), "
    "the mask variable and the devices of the container",
    "temp folder": "Logs and spilled objects go there: name a folder with "
    f"{size(_TEMP_FREE_WANTED)} by RAY_TMPDIR",
    "socket paths": f"The system takes {SOCKET_PATH_BYTES}: name a shorter temp folder by "
    "RAY_TMPDIR or TMPDIR",
    "ports": "A head cannot listen there: choose another port, or stop the program that holds it "
    "(ss -tlnp)",
    "proxies": "gRPC would send Ray's messages there: put the nodes' addresses in no_proxy, or "
    "unset them",
    "shared memory: fresh": "This kernel grants no leases: large values take several times as long",
    "shared memory": "Large values are copied through sockets: memfd needs Linux",
}
"""Problem -> advice. A problem is the name of its check, or begins with it."""
_BAD = {"launcher", "available memory", "accelerators", "socket paths", "proxies"}
"""Problems with which runs fail; the others are warnings."""

_SAME = ("python", "helmsman", "ray", "torch", "transformers", "vllm")
"""Checks with values that must be equal on all nodes; otherwise the cluster fails, now or later."""
_ADVISED_SAME = ("kernel", "cpus", "memory", "accelerators", "open files", "shared memory")


class DoctorCheck(msgspec.Struct, frozen=True):
    """One row of the doctor's table."""

    name: str
    value: str
    state: State = "ok"
    advice: str = ""


def judge(seen: Observed, *, num_devices: int | None = None) -> list[DoctorCheck]:
    """Evaluate a node, which should have ``num_devices`` accelerators; None accepts any number."""
    found, proxies = seen.devices, [f"{name}={value}" for name, value in seen.proxies.items()]
    busy = [f"{port}: {reason}" for port, reason in seen.busy_ports.items()]
    tried = f"{', '.join(map(str, seen.tried_ports))} free" if seen.tried_ports else "none tried"
    excepted = {each.strip() for each in seen.no_proxy.split(",")} - {""}
    spared = ["not for this node"] if excepted & {"*", seen.address} else []
    path_bytes = len(os.fsencode(seen.temp_dir)) + RAY_SOCKET_BYTES
    store = int(seen.memory_available * OBJECT_STORE_SHARE)
    segments = {"reused": "memfd, used again", "fresh": "memfd, used once", "none": "none"}
    values = {
        "launcher": seen.launcher,
        "address": seen.address or "no route",
        "python": seen.python,
        **{name: version for name, version in seen.versions.items() if version},
        "ray": seen.versions.get("ray") or "not installed",
        "kernel": seen.kernel,
        "cpus": f"{seen.cpus_allowed:g} of {seen.cpus}",
        "memory": size(seen.memory),
        "available memory": size(seen.memory_available),
        "/dev/shm": f"{size(seen.shm_free)} free of {size(seen.shm_total)}",
        "open files": "unlimited" if seen.open_files >= UNLIMITED else str(seen.open_files),
        "accelerators": f"{len(found)} {seen.device_kind} ({','.join(found)})" if found else "none",
        "temp folder": f"{seen.temp_dir}, {size(seen.temp_free)} free",
        "socket paths": f"{path_bytes} bytes",
        "ports": "; ".join(busy) or tried,
        "proxies": ", ".join([*proxies, *spared] if proxies else ["none"]),
        "shared memory": segments[seen.segments],
    }
    problems: dict[str, object] = {
        "launcher": seen.launcher_error,
        "address": not seen.address,
        "address: loopback": seen.address.startswith("127."),
        "ray": not seen.versions.get("ray"),
        "cpus": seen.cpus_allowed < 1,
        "available memory": seen.memory_available < _MEMORY_NEEDED,
        "/dev/shm": seen.shm_free < store,
        "open files: hard": seen.open_files_hard < _FILES_WANTED,
        "open files": seen.open_files < _FILES_WANTED,
        "accelerators": num_devices not in (None, len(found)),
        "temp folder": seen.temp_free < _TEMP_FREE_WANTED,
        "socket paths": path_bytes > SOCKET_PATH_BYTES,
        "ports": busy,
        "proxies": proxies and not spared,
        "shared memory: fresh": seen.segments == "fresh",
        "shared memory": seen.segments == "none",
    }
    # The first problem of a check counts.
    found_by = {each.partition(":")[0]: each for each in reversed(problems) if problems[each]}
    facts = {"seen": seen, "store": size(store), "num_devices": num_devices}

    def check(name: str, value: str) -> DoctorCheck:
        if (problem := found_by.get(name)) is None:
            return DoctorCheck(name, value)
        state: State = "bad" if problem in _BAD else "warn"
        return DoctorCheck(name, value, state, _ADVICE[problem].format(**facts))

    return [check(*row) for row in values.items()]


class Examined(msgspec.Struct, frozen=True):
    node: str
    checks: list[DoctorCheck]


class DoctorReport(msgspec.Struct, frozen=True):
    nodes: list[Examined]
    between: list[DoctorCheck]

    @property
    def state(self) -> State:
        checks = [check for node in self.nodes for check in node.checks] + self.between
        return max((check.state for check in checks), key=list(_MARKS).index, default="ok")

    def report(self, *, everything: bool = False) -> str:
        """Format the table of a single node, or the failed checks and differences of several."""
        if len(self.nodes) == 1:
            return _table(self.nodes[0].checks)
        lines = [f"{len(self.nodes)} nodes"]
        for node in self.nodes:
            shown = [check for check in node.checks if everything or check.state != "ok"]
            lines += ["", f"{node.node}:\n{_table(shown)}" if shown else f"{node.node}: in order"]
        return "\n".join([*lines, "", "between the nodes:", _table(self.between)])


def diagnose(
    seen: Mapping[str, Observed],
    *,
    num_devices: int | None = None,
    skews_s: Mapping[str, float] | None = None,
) -> DoctorReport:
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
    return DoctorReport(nodes, _between(nodes, skews_s or {}) if len(nodes) > 1 else [])


def _between(nodes: Sequence[Examined], skews_s: Mapping[str, float]) -> list[DoctorCheck]:
    checks = []
    for name in (*_SAME, *_ADVISED_SAME):
        where: dict[str, list[str]] = {}
        for node in nodes:
            value = next((each.value for each in node.checks if each.name == name), "not installed")
            where.setdefault(value, []).append(node.node)
        usual = max(where, key=lambda value: len(where[value]))
        others = [f"{value} on {', '.join(on)}" for value, on in where.items() if value != usual]
        value = "; ".join([f"{usual} on most", *others])
        if others and name in _SAME:
            checks.append(DoctorCheck(name, value, "bad", "Install the same version on every node"))
        elif others:
            advice = "If this is not intended, check the nodes that differ"
            checks.append(DoctorCheck(name, value, "warn", advice))
    if skews_s:
        spread = max(skews_s.values()) - min(skews_s.values())
        value, ahead = f"{spread:.2f} s apart", max(skews_s, key=lambda node: skews_s[node])
        if spread > MOST_SKEW_S:
            step = "Let all nodes follow one time server (chronyc tracking)"
            checks.append(
                DoctorCheck("clocks", f"{value}, {ahead} is furthest ahead", "warn", step)
            )
        else:
            checks.append(DoctorCheck("clocks", value))
    return checks or [DoctorCheck("differences", "none")]


def _table(checks: Sequence[DoctorCheck]) -> str:
    """Format checks as a table, with the advice for each problem below."""
    rows = aligned([(f"  {_MARKS[each.state]}", each.name, each.value) for each in checks])
    advice = [f"  {each.name}: {each.advice.rstrip('.')}." for each in checks if each.advice]
    return "\n".join([rows, *advice])
