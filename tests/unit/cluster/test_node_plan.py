"""Tests of a node's plan: the command that starts Ray, its ports and its environment."""

from __future__ import annotations

import itertools
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman._cluster.connection import proof_key
from helmsman._cluster.node_plan import (
    node_environ,
    ray_start,
    ray_token,
    worker_ports,
)
from helmsman._cluster.settings import Setting
from helmsman._process.ports import RANGE_VARIABLE, PortLeases
from helmsman.api.errors import PreflightError
from tests.cluster.nodes import make_plan

AGENTS = {
    *(
        "--node-manager-port",
        "--object-manager-port",
        "--runtime-env-agent-port",
        "--dashboard-agent-listen-port",
    ),
    *("--dashboard-agent-grpc-port", "--metrics-export-port"),
}
"""Ports of Ray that would by default collide with ephemeral ports or with another node."""


@pytest.fixture
def leases() -> Iterator[PortLeases]:
    made = PortLeases()
    yield made
    made.close()


def flags(command: list[str]) -> dict[str, str]:
    """Return the flags of a command and their values, '' for flags without a value."""
    return {
        flag: value
        for flag, _, value in (each.partition("=") for each in command if each.startswith("--"))
    }


def first_ephemeral() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


# --- the command ----------------------------------------------------------------------------------


def test_ray_start_of_the_head(tmp_path: Path, leases: PortLeases) -> None:
    plan = make_plan(tmp_path, resources={"CPU": 4.0, "GPU": 2.0, "fast": 0.5})
    command = ray_start(plan, "run-1", leases)
    assert command[1:4] == ["-m", "helmsman.controller._scheduler.ray.start_limits", "start"]
    found = flags(command)
    assert {"--head", "--block", "--disable-usage-stats"} <= {
        flag for flag, value in found.items() if not value
    }
    assert "--address" not in found
    expected = {
        "--port": "6379",
        "--include-dashboard": "false",
        "--node-ip-address": "127.0.0.1",
        "--temp-dir": f"{tmp_path}/ray",
        "--object-store-memory": str(1 << 28),
        "--labels": "helmsman-run=run-1,helmsman-rank=0",
        "--num-cpus": "4",
        "--num-gpus": "2",
        "--resources": '{"fast": 0.5}',
    }
    assert expected.items() <= found.items()
    assert (
        flags(ray_start(make_plan(tmp_path, dashboard=True), "run-1", leases))[
            "--include-dashboard"
        ]
        == "true"
    )


def test_ray_start_of_another_node(tmp_path: Path, leases: PortLeases) -> None:
    found = flags(ray_start(make_plan(tmp_path, rank=2, count=3), "run-1", leases, "10.0.0.1:6379"))
    assert found["--address"] == "10.0.0.1:6379"
    assert found["--labels"] == "helmsman-run=run-1,helmsman-rank=2"
    assert found["--temp-dir"] == f"{tmp_path}/ray", "the default is the path of the head"
    assert (
        not {"--head", "--port", "--ray-client-server-port", "--include-dashboard"} & found.keys()
    )


# --- ports ----------------------------------------------------------------------------------------


def ports_of(command: list[str]) -> list[int]:
    return [
        int(value)
        for flag, value in flags(command).items()
        if flag in AGENTS or flag == "--ray-client-server-port"
    ]


def test_ray_start_ports_of_two_nodes(tmp_path: Path, leases: PortLeases) -> None:
    others = PortLeases()
    try:
        head = ray_start(make_plan(tmp_path), "run-1", leases)
        member = ray_start(make_plan(tmp_path, rank=1, count=2), "run-1", others, "127.0.0.1:6379")
    finally:
        others.close()
    assert flags(head).keys() >= AGENTS
    assert flags(member).keys() >= AGENTS
    ports = ports_of(head) + ports_of(member)
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < first_ephemeral() for port in ports)
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            probe.bind(("", port))


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([(6379, 6379), (20_000, 32_767)], (10_002, 19_999)),
        ([(12_000, 12_000), (12_001, 12_001)], (12_002, 19_999)),
        ([(19_000, 19_000), (0, 0)], (10_002, 18_999)),
        ([(10_000, 10_500), (15_000, 15_000), (19_500, 32_000)], (10_501, 14_999)),
    ],
)
def test_worker_ports(taken: list[tuple[int, int]], expected: tuple[int, int]) -> None:
    assert worker_ports(taken) == expected


def test_worker_ports_without_room() -> None:
    with pytest.raises(PreflightError) as caught:
        worker_ports([(1024, 65_535)])
    for fact in (
        "10002 to 19999",
        "--port, --control-port and HELMSMAN_PORT_RANGE",
        "to others",
    ):
        assert fact in str(caught.value)


@pytest.mark.parametrize(
    "ports", [{"port": 12_345}, {"port": 15_000, "control_port": 15_001, "count": 2}]
)
def test_ray_start_worker_ports(
    tmp_path: Path, leases: PortLeases, monkeypatch: pytest.MonkeyPatch, ports: dict[str, Any]
) -> None:
    monkeypatch.setenv(RANGE_VARIABLE, "12000-12100")
    plan = make_plan(tmp_path, **ports)
    command = ray_start(plan, "run-1", leases)
    first, last = (int(flags(command)[f"--{bound}-worker-port"]) for bound in ("min", "max"))
    assert last - first > 1000
    assert all(12_000 <= port <= 12_100 for port in ports_of(command))
    assert not {plan.port, plan.control_port, *range(12_000, 12_101)} & set(range(first, last + 1))


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("25000-25002", ("6 ports cannot be leased", RANGE_VARIABLE, "wider range")),
        ("many", (f"{RANGE_VARIABLE} is 'many'", "FIRST-LAST")),
    ],
)
def test_ray_start_without_ports(
    tmp_path: Path,
    leases: PortLeases,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    facts: tuple[str, ...],
) -> None:
    monkeypatch.setenv(RANGE_VARIABLE, text)
    with pytest.raises(PreflightError) as caught:
        ray_start(make_plan(tmp_path), "run-1", leases)
    for fact in ("no ports for Ray could be reserved on this node", *facts):
        assert fact in str(caught.value)


# --- the environment ------------------------------------------------------------------------------


def test_node_environ(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, node_settings=[Setting("NCCL_DEBUG", "INFO")])
    environ = {
        "HOME": "/home/u",
        "NCCL_DEBUG": "WARN",
        "RAY_worker_niceness": "15",
        "RAY_ADDRESS": "10.9.9.9:6379",
        "RAY_AUTH_TOKEN": "another",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": "/elsewhere",
    }
    assert node_environ(plan, {"RAY_worker_niceness": "0"}, "the token", environ) == {
        "HOME": "/home/u",
        "NCCL_DEBUG": "INFO",
        "RAY_worker_niceness": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "RAY_TMPDIR": str(tmp_path),
    }


def test_token_file_is_private(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run")
    before = os.umask(0)
    try:
        for token in ("the token", "another"):
            node_environ(plan, {}, token, {})
    finally:
        os.umask(before)
    assert (plan.folder / "token").read_text() == "another"
    assert stat.S_IMODE((plan.folder / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(plan.folder.stat().st_mode) == 0o700


def test_tokens_and_jobs_by_secret(tmp_path: Path) -> None:
    tokens = [ray_token(*pair) for pair in itertools.product(("a", "b"), ("run-1", "run-2"))]
    assert len(set(tokens)) == 4
    assert tokens[0] == ray_token("a", "run-1"), "other nodes derive the same token"
    assert all(len(token) == 64 for token in tokens)
    plans = [
        make_plan(tmp_path, count=count, secret=secret) for count in (2, 3) for secret in ("", "a")
    ]
    assert plans[0].job != plans[2].job
    assert plans[1].job == plans[3].job, "the head reports a different number of nodes"
    assert (
        len(
            {
                proof_key(secret, job)
                for secret in ("", "a", "b")
                for job in ("", "2 6380", "3 6380")
            }
        )
        == 9
    )
