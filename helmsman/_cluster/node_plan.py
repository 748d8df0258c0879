"""The plan of ``helmsman up`` for a node, made before any start, and Ray's command line."""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from helmsman._cluster.connection import LinkTimeouts
from helmsman._cluster.settings import Setting, resource_arguments
from helmsman._process.launchers import NodeIdentity
from helmsman._process.ports import RANGE_VARIABLE, PortLeases, port_range
from helmsman.api.errors import PreflightError
from helmsman.controller._scheduler.run_registry import RANK_LABEL, RUN_LABEL

_WORKER_PORTS = (10_002, 19_999)
_FEWEST_WORKER_PORTS = 100
_AGENT_PORTS = (
    "--node-manager-port",
    "--object-manager-port",
    "--runtime-env-agent-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--metrics-export-port",
)
RAY_COMMAND = (sys.executable, "-m", "helmsman.controller._scheduler.ray.start_limits", "start")


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan for one node of a run. Times are in seconds, sizes in bytes."""

    run_id: str
    """Id of this node's part of the run; that of rank 0 is the run's id."""
    identity: NodeIdentity
    command: Sequence[str]
    address: str
    port: int
    """Port of the head's Ray; 0 to lease one, with one node."""
    control_port: int
    """Port of the head's supervisor; 0 with one node."""
    secret: str
    """Secret shared by all nodes of the run; '' if the user gives none."""
    versions: Mapping[str, str]
    num_devices: int
    device_kind: str
    resources: Mapping[str, float]
    """Logical resources for Ray."""
    store_bytes: int
    cluster_settings: Sequence[Setting]
    node_settings: Sequence[Setting]
    timeout_s: float
    """Limit for all nodes to join."""
    grace_s: float
    """Time for the script to exit after a signal."""
    folder: Path
    """Folder of this run on this node, with its token and Ray's files; the path is short enough for
    Ray's sockets.
    """
    dashboard: bool = False
    tls: bool = True
    elastic: bool = False
    """Whether the run continues when a node receives a signal."""
    ray_command: Sequence[str] = RAY_COMMAND
    ray_start_s: float = 60.0
    """Limit for a start of Ray (--start-timeout). It takes a few seconds, more on a busy node."""
    timeouts: LinkTimeouts = LinkTimeouts()

    @property
    def tag(self) -> str:
        """Tag of all processes that the supervisor starts here."""
        return f"{self.run_id}/up"

    @property
    def job(self) -> str:
        """Separates jobs without a secret.

        With a secret it is the same for all jobs, so that the head can report the difference.
        """
        return "" if self.secret else f"{self.identity.count} {self.control_port}"


def ray_token(secret: str, run_id: str) -> str:
    return hmac.new(secret.encode(), f"ray {run_id}".encode(), hashlib.sha256).hexdigest()


def node_environ(
    plan: NodePlan, cluster: Mapping[str, str], token: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of all processes on the node.

    ``cluster`` has Ray's variables with the head's values. ``token``, that of the Ray cluster, is
    written to a file that only this user can read.
    """
    plan.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = plan.folder / "token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token)
    kept = {
        name: value
        for name, value in environ.items()
        if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
    }
    return {
        **kept,
        **{setting.name: setting.value for setting in plan.node_settings},
        **cluster,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(path),
        "RAY_TMPDIR": str(plan.folder),
    }


def lease(leases: PortLeases, count: int) -> list[int]:
    """Lease ports below the ephemeral range that need not be known in advance.

    Raises:
        PreflightError: There are not enough ports.
    """
    try:
        return leases.lease(count)
    except (OSError, ValueError) as error:
        raise PreflightError(f"no ports for Ray could be reserved on this node: {error}") from error


def worker_ports(taken: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the first and last port for Ray's workers, the longest range outside ``taken``.

    Ray refuses to start if two of its parts could use one port.

    Raises:
        PreflightError: No range is long enough.
    """
    runs = [_WORKER_PORTS]
    for low, high in taken:
        cut = [
            run
            for first, last in runs
            for run in ((first, min(last, low - 1)), (max(first, high + 1), last))
        ]
        runs = [(first, last) for first, last in cut if last - first >= _FEWEST_WORKER_PORTS]
    if not runs:
        raise PreflightError(
            f"no ports are left for Ray's workers on this node: --port, --control-port and "
            f"{RANGE_VARIABLE} leave fewer than {_FEWEST_WORKER_PORTS} consecutive ports of "
            f"{_WORKER_PORTS[0]} to {_WORKER_PORTS[1]}; set {RANGE_VARIABLE} to others"
        )
    return max(runs, key=lambda run: run[1] - run[0])


def ray_start(plan: NodePlan, run_id: str, leases: PortLeases, head: str = "") -> list[str]:
    """Return the command that starts Ray here and joins ``head``; '' starts a head.

    Raises:
        PreflightError: There are not enough ports.
    """
    ports = [
        f"{flag}={port}"
        for flag, port in zip(_AGENT_PORTS, lease(leases, len(_AGENT_PORTS)), strict=True)
    ]
    first, last = worker_ports(
        [(plan.port, plan.port), (plan.control_port, plan.control_port), port_range(os.environ)]
    )
    where = (
        [f"--address={head}"]
        if head
        else [
            "--head",
            f"--port={plan.port}",
            *([f"--ray-client-server-port={lease(leases, 1)[0]}"] if find_spec("grpc") else []),
            f"--include-dashboard={'true' if plan.dashboard else 'false'}",
        ]
    )
    return [
        *plan.ray_command,
        *where,
        "--block",
        "--disable-usage-stats",
        "--include-log-monitor=false",
        f"--node-ip-address={plan.address}",
        f"--temp-dir={plan.folder}/ray",  # otherwise a joining node uses the head's path
        f"--min-worker-port={first}",
        f"--max-worker-port={last}",
        *ports,
        f"--object-store-memory={plan.store_bytes}",
        f"--labels={RUN_LABEL}={run_id},{RANK_LABEL}={plan.identity.rank}",
        *resource_arguments(plan.resources),
    ]
