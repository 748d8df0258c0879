"""Node health checks: ``judge`` and ``diagnose`` evaluate the facts of ``observe``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from helmsman.controller._node.observation import (
    MEMORY_BESIDE_STORE,
    OBJECT_STORE_SHARE,
    RAY_SOCKET_BYTES,
    SOCKET_PATH_BYTES,
    STORE_LEAST,
    UNLIMITED,
    Observed,
    size,
)

State = Literal["ok", "warn", "bad"]


_FILES_WANTED = 65_536
_TEMP_FREE_WANTED = 10 << 30


class Check(msgspec.Struct, frozen=True):
    """One row of the doctor's table."""

    name: str
    value: str
    state: State = "ok"
    advice: str = ""


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
        "emptyDir with medium Memory), or objects that do not fit spill to disk"
    )
    files = f"A head of many nodes needs {_FILES_WANTED}: ulimit -n {_FILES_WANTED}"
    if seen.open_files_hard < _FILES_WANTED:
        files = (
            f"A head of many nodes needs {_FILES_WANTED}: raise the hard limit of "
            f"{seen.open_files_hard} (LimitNOFILE of the "
            "service, docker --ulimit, limits.conf)"
        )
    devices = (
        f"{num_devices} are expected: check the driver (nvidia-smi, npu-smi), the mask "
        "variable and the devices of the container"
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
            "unlimited" if seen.open_files >= UNLIMITED else str(seen.open_files),
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
        advice = "Only the local and inline schedulers work: pip install 'helmsman-rl[ray]'"
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
