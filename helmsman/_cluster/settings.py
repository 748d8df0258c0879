"""Variables that ``helmsman up`` sets on a node, with reasons; sizes and resources for Ray.

The user's own values override them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from helmsman._process.observation import (
    MEMORY_BESIDE_STORE,
    OBJECT_STORE_SHARE,
    STORE_LEAST,
    size,
)
from helmsman.api.environment import masked
from helmsman.api.errors import PreflightError
from helmsman.api.plan import aligned
from helmsman.controller._scheduler.ray.start_limits import LIMIT_VARIABLE

GIB = 1 << 30
_STORE_MOST = 200 * GIB
_SHM_SHARE = 0.95

_FLAGS = {"CPU": "--num-cpus", "GPU": "--num-gpus", "memory": "--memory"}
"""Flags of ``ray start`` that take an integer."""

Source = Literal["default", "your environment", "--env"]


class Setting(msgspec.Struct, frozen=True):
    name: str
    value: str
    reason: str = ""
    source: Source = "default"


MANY_NODES = 32
"""Clusters from this size on tolerate a busy head; smaller ones detect lost hosts early."""

_FEW = """
RAY_grpc_client_keepalive_time_ms=5000  a host that vanishes is noticed in 21 s instead of 241 s
RAY_grpc_client_keepalive_timeout_ms=5000  the same
RAY_gcs_rpc_server_reconnect_timeout_s=10  Ray outlives its head by 12 s at most, not by 62 s
"""
_MANY = """
RAY_grpc_client_keepalive_time_ms=60000  thousands of workers do not load the head with pings
RAY_grpc_client_keepalive_timeout_ms=60000  a head that answers late keeps its connections
RAY_grpc_keepalive_time_ms=60000  the head sends fewer pings while it is busy
RAY_grpc_keepalive_timeout_ms=60000  workers that answer late keep their connections
RAY_gcs_rpc_server_reconnect_timeout_s=120  nodes survive a head that is busy for two minutes
RAY_gcs_server_request_timeout_seconds=120  a worker waits for a busy head, instead of 60 s
RAY_worker_register_timeout_seconds=300  workers that register late are not killed, as after 60 s
RAY_gcs_server_rpc_server_thread_num=64  thousands register; one thread per 4 CPUs lags
RAY_gcs_server_rpc_client_thread_num=64  the same for the answers of nodes and workers
RAY_num_server_call_thread=32  the same for the answers of the head
RAY_raylet_report_resources_period_milliseconds=500  nodes report five times less often
RAY_task_events_report_interval_ms=5000  the same for data of Ray's dashboard
"""
_ALL = """
RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  a busy actor does not hold up the end of a node for 30 s
RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0  workers without devices keep the masks that they inherit
RAY_ENABLE_UV_RUN_RUNTIME_ENV=0  'uv run' gives the workers of its script no environment to build
RAY_worker_niceness=0  workers run at the priority of the script; Ray's default of 15 starves them
RAY_USAGE_STATS_ENABLED=0  no usage statistics are sent
{limit}={start_s}  as --start-timeout; a busy node takes longer than Ray's 20 to 30 s
RAY_agent_register_timeout_ms={start_s}000  as --start-timeout; instead of 30 s
RAY_gcs_rpc_server_connect_timeout_s={start_s}  as --start-timeout; instead of 5 s
"""
_NODE = """
NCCL_DEBUG=WARN  NCCL logs the cause of its failures
HCCL_CONNECT_TIMEOUT=600  ranks that load a large model late are waited for (seconds, not 120)
HCCL_HOST_SOCKET_PORT_RANGE=auto  processes that share an NPU have ports of their own
HCCL_NPU_SOCKET_PORT_RANGE=auto  the same for the ports of the NPU
PYTHONUNBUFFERED=1  output of workers appears in their logs at once
"""


def _settings(text: str) -> tuple[Setting, ...]:
    rows = (line.replace("=", "  ", 1).split("  ", 2) for line in text.split("\n") if line)
    return tuple(Setting(name, value, reason) for name, value, reason in rows)


def cluster_defaults(num_nodes: int, start_s: float = 60.0) -> tuple[Setting, ...]:
    """Return Ray's variables for a cluster; the head's values apply on all nodes.

    ``start_s`` is the limit for a start of Ray, in seconds. It replaces Ray's own limits for parts
    of a start, which are too short for a busy node.
    """
    text = (_FEW if num_nodes < MANY_NODES else _MANY) + _ALL
    return _settings(text.format(limit=LIMIT_VARIABLE, start_s=max(1, round(start_s))))


NODE_DEFAULTS = _settings(_NODE)
"""Variables of every node, for its workers and programs."""


def variables(
    defaults: Iterable[Setting], environ: Mapping[str, str], given: Mapping[str, str]
) -> list[Setting]:
    """Return the defaults with the user's values: first --env (``given``), then the environment."""
    layers: Mapping[Source, Mapping[str, str]] = {"--env": given, "your environment": environ}

    def chosen(default: Setting) -> Setting:
        for source, own in layers.items():
            if default.name in own:
                return Setting(default.name, own[default.name], default.reason, source)
        return default

    return list(map(chosen, defaults))


def of_address(address: str, interface: str, *, chosen: bool) -> list[Setting]:
    """Return the variables that give libraries the node's address; ``interface`` may be ''.

    Only an interface that the user has ``chosen`` restricts NCCL and HCCL, which may have faster
    ones.
    """
    names = ["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"] if interface else []
    names += ["NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"] if interface and chosen else []
    return [
        Setting("VLLM_HOST_IP", address, "the address that other nodes reach"),
        *(Setting(name, interface, "the interface of the node's address") for name in names),
    ]


def shown(settings: Sequence[Setting]) -> str:
    """Format settings as a table, with secrets masked."""
    return aligned(
        [
            (f"  {each.name}={masked(each.name, each.value)}", each.source, each.reason)
            for each in settings
        ]
    )


def parse_variables(given: Iterable[str]) -> dict[str, str]:
    """Parse NAME=VALUE arguments of --env.

    Raises:
        PreflightError: An argument has another form.
    """
    parsed = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name.isidentifier():
            shown = f"{name}={masked(name, value)}" if equals else masked("", each)
            raise PreflightError(f"--env {shown!r} is not NAME=VALUE")
        parsed[name] = value
    return parsed


def parse_resources(text: str) -> dict[str, float]:
    """Parse Ray's logical resources from JSON: {"CPU": 8, "GPU": 2, "NPU": 4}.

    Raises:
        PreflightError: The text is not a JSON object of valid amounts.
    """
    try:
        parsed = msgspec.json.decode(text, type=dict[str, float])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PreflightError(
            f"--resources {text!r} is not a JSON object of numbers, such as '{{\"NPU\": 8}}': "
            f"{error}"
        ) from error
    if wrong := [name for name, amount in parsed.items() if amount < 0]:
        raise PreflightError(f"--resources has a negative amount of {', '.join(wrong)}")
    if wrong := [
        f"{parsed[name]:g} {name}" for name in _FLAGS if not parsed.get(name, 0.0).is_integer()
    ]:
        raise PreflightError(
            f"--resources has {', '.join(wrong)}, expected whole numbers; round them down"
        )
    return parsed


def object_store_bytes(asked: float | None, available: int, shm_free: int) -> int:
    """Return the size of Ray's object store in bytes.

    Args:
        asked: Size in GiB; by default 30 % of the available memory, limited by /dev/shm.
        available: Bytes of memory that programs can still allocate on this node.
        shm_free: Free bytes of /dev/shm.

    Returns:
        The size in bytes.

    Raises:
        PreflightError: The store does not fit into /dev/shm, or leaves too little memory for Ray's
            processes.
    """
    rest, shm = available - MEMORY_BESIDE_STORE, int(shm_free * _SHM_SHARE)
    step = "enlarge /dev/shm (docker --shm-size, an emptyDir with medium Memory)"
    if asked is not None:
        wanted = asked * GIB
        if not STORE_LEAST <= wanted <= min(rest, shm):  # also rejects nan
            raise PreflightError(
                f"--object-store {asked:g} GiB: /dev/shm has {size(shm_free)} free, and "
                f"{size(available)} of memory are "
                f"available, of which Ray's processes take {size(MEMORY_BESIDE_STORE)}; the store "
                f"needs {size(STORE_LEAST)}. "
                f"Ask for less, end other programs, or {step}"
            )
        return int(wanted)
    if rest < STORE_LEAST:
        raise PreflightError(
            f"Ray cannot start on this node: {size(max(available, 0))} of memory are available, "
            "expected "
            f"{size(STORE_LEAST + MEMORY_BESIDE_STORE)}. End other programs, remove files from "
            "/dev/shm, or raise the limit of "
            "the container or the job; helmsman doctor shows the figures"
        )
    if shm < STORE_LEAST:
        raise PreflightError(
            f"/dev/shm has {size(shm_free)} free, and Ray's object store needs "
            f"{size(STORE_LEAST)}: {step}"
        )
    return min(max(int(available * OBJECT_STORE_SHARE), STORE_LEAST), rest, shm, _STORE_MOST)


def resource_arguments(resources: Mapping[str, float]) -> list[str]:
    arguments = [
        f"{flag}={int(resources[name])}" for name, flag in _FLAGS.items() if name in resources
    ]
    others = {name: amount for name, amount in resources.items() if name not in _FLAGS}
    return [*arguments, f"--resources={json.dumps(others)}"] if others else arguments
