"""The plan of ``helmsman up`` for a node, made before anything is started, and the command line of
Ray that follows from it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from helmsman.api.errors import PreflightError
from helmsman.controller._bootstrap.connection import LinkTimeouts
from helmsman.controller._bootstrap.settings import Setting, resource_arguments
from helmsman.controller._node.launchers import NodeIdentity
from helmsman.controller._node.run_registry import RANK_LABEL, RUN_LABEL
from helmsman.rpc_server.ports import RANGE_VARIABLE, PortLeases, port_range

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
RAY_COMMAND = (sys.executable, "-m", "helmsman.controller._ray_backend.start_limits", "start")


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The part of this node in a run. Times in seconds, sizes in bytes."""

    run_id: str
    """Of this node's part of the run; that of rank 0 is the run's."""
    identity: NodeIdentity
    command: Sequence[str]
    address: str
    port: int
    """Of the head's Ray; 0 to lease one, with one node."""
    control_port: int
    """On which the head's supervisor listens; 0 with one node."""
    secret: str
    """Known to all nodes of the run; '' when the user gave none."""
    versions: Mapping[str, str]
    num_devices: int
    device_kind: str
    resources: Mapping[str, float]
    """For Ray."""
    store_bytes: int
    cluster_settings: Sequence[Setting]
    node_settings: Sequence[Setting]
    timeout_s: float
    """For all nodes to come."""
    grace_s: float
    """That the script has to end when it is told to."""
    folder: Path
    """Of this run on this node: its token, and all that Ray writes; its path is short, for Ray's
    sockets.
    """
    dashboard: bool = False
    tls: bool = True
    elastic: bool = False
    """The run goes on when a node is told to leave."""
    ray_command: Sequence[str] = RAY_COMMAND
    ray_start_s: float = 60.0
    """Seconds that Ray may take to start (--start-timeout). It takes a few, and more on an
    overloaded node.
    """
    timeouts: LinkTimeouts = LinkTimeouts()

    @property
    def tag(self) -> str:
        """By which all that the supervisor starts here is recognised."""
        return f"{self.run_id}/up"

    @property
    def job(self) -> str:
        """Distinguishes jobs without a secret; with one it is the same for all, so that the head
        can say what differs.
        """
        return "" if self.secret else f"{self.identity.count} {self.control_port}"


def ray_token(secret: str, run_id: str) -> str:
    return hmac.new(secret.encode(), f"ray {run_id}".encode(), hashlib.sha256).hexdigest()


def node_environ(
    plan: NodePlan, cluster: Mapping[str, str], token: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """Environment of all that is started on the node.

    ``cluster`` has Ray's variables, as the head has them; ``token``, of the Ray cluster, is written
    to a file of this user alone.
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
    """Ports that need not be known beforehand, below the ephemeral range. Raises:
    PreflightError.
    """
    try:
        return leases.lease(count)
    except (OSError, ValueError) as error:
        raise PreflightError(f"Ray has no ports on this node: {error}") from error


def worker_ports(taken: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """First and last of the ports for Ray's workers: the longest run that has none of these ranges
    in it.

    Ray refuses to start with a port that two of its parts could use. Raises: PreflightError.
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
            f"Ray's workers have no ports on this node: of {_WORKER_PORTS[0]} to "
            f"{_WORKER_PORTS[1]}, --port, --control-port "
            f"and {RANGE_VARIABLE} leave no {_FEWEST_WORKER_PORTS} in a row; set {RANGE_VARIABLE} "
            "to a range outside"
        )
    return max(runs, key=lambda run: run[1] - run[0])


def ray_start(plan: NodePlan, run_id: str, leases: PortLeases, head: str = "") -> list[str]:
    """The command that starts Ray on this node, to join the cluster at ``head``; '' to be its head.
    Raises: PreflightError when there are not enough ports.
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
        f"--temp-dir={plan.folder}/ray",  # or a node that joins would use the head's path
        f"--min-worker-port={first}",
        f"--max-worker-port={last}",
        *ports,
        f"--object-store-memory={plan.store_bytes}",
        f"--labels={RUN_LABEL}={run_id},{RANK_LABEL}={plan.identity.rank}",
        *resource_arguments(plan.resources),
    ]
