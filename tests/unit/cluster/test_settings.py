"""Tests of the settings of ``helmsman up``: variables, resources, object store and memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from helmsman._cluster.settings import (  # type: ignore[attr-defined]
    GIB,
    MANY_NODES,
    NODE_DEFAULTS,
    STORE_LEAST,
    Setting,
    cluster_defaults,
    object_store_bytes,
    of_address,
    parse_resources,
    parse_variables,
    resource_arguments,
    shown,
    variables,
)
from helmsman._process.observation import (
    MEMORY_BESIDE_STORE,
    MemoryGroup,
    cpus_allowed,
    memory_allowed,
    memory_available,
    memory_groups,
)
from helmsman.api.environment import MASK
from helmsman.api.errors import PreflightError

LEAST = STORE_LEAST + MEMORY_BESIDE_STORE
TABLE = (Setting("A", "1", "of A"), Setting("B", "2", "of B"), Setting("C", "3", "of C"))


# --- variables ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [1, MANY_NODES])
def test_cluster_defaults_are_unique_with_reasons(num_nodes: int) -> None:
    same_on_all = cluster_defaults(num_nodes)
    own = [*NODE_DEFAULTS, *of_address("10.0.0.1", "eth0", chosen=True)]
    names = [default.name for default in (*same_on_all, *own)]
    assert len(set(names)) == len(names)
    assert all(default.value and default.reason for default in (*same_on_all, *own))
    assert all(default.name.startswith("RAY_") for default in same_on_all)
    assert not any(default.name.startswith("RAY_") for default in own)


def test_cluster_defaults_by_number_of_nodes() -> None:
    """Few nodes detect a lost host soon; the head of many nodes is too busy for that."""

    def seconds(num_nodes: int) -> float:
        values = {
            each.name: float(each.value)
            for each in cluster_defaults(num_nodes)
            if each.value.isdecimal()
        }
        assert (
            values["RAY_gcs_rpc_server_reconnect_timeout_s"] * 1000
            > values["RAY_grpc_client_keepalive_timeout_ms"]
        )
        return values["RAY_gcs_rpc_server_reconnect_timeout_s"]

    assert cluster_defaults(1) == cluster_defaults(MANY_NODES - 1)
    assert cluster_defaults(MANY_NODES) == cluster_defaults(10 * MANY_NODES)
    assert (seconds(1), seconds(MANY_NODES)) == (10, 120)


def test_variables_precedence() -> None:
    """Flags come first, then the environment, then defaults; an empty value is a value."""
    environ = {"B": "", "C": "from the environment", "D": "no default"}
    found = variables(TABLE, environ, {"C": "from a flag", "E": "no default"})
    assert found == [
        Setting("A", "1", "of A"),
        Setting("B", "", "of B", "your environment"),
        Setting("C", "from a flag", "of C", "--env"),
    ]
    lines = [re.split(r"\s{2,}", line.strip()) for line in shown(found).splitlines()]
    assert lines == [
        ["A=1", "default", "of A"],
        ["B=", "your environment", "of B"],
        ["C=from a flag", "--env", "of C"],
    ]


def test_of_address_with_a_named_interface() -> None:
    assert {each.name: each.value for each in of_address("10.0.0.1", "", chosen=False)} == {
        "VLLM_HOST_IP": "10.0.0.1"
    }
    found = {each.name: each.value for each in of_address("10.0.0.1", "eth0", chosen=False)}
    assert found == {
        "VLLM_HOST_IP": "10.0.0.1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
    }
    chosen = {each.name: each.value for each in of_address("10.0.0.1", "eth0", chosen=True)}
    assert chosen == {**found, "NCCL_SOCKET_IFNAME": "eth0", "HCCL_SOCKET_IFNAME": "eth0"}


def test_shown_masks_secrets() -> None:
    lines = shown([Setting("HF_TOKEN", "hunter2"), Setting("B", "http://me:hunter2@host")])
    assert [line.split()[0] for line in lines.splitlines()] == [
        f"HF_TOKEN={MASK}",
        f"B=http://{MASK}@host",
    ]


def test_parse_variables() -> None:
    assert parse_variables([]) == {}
    assert parse_variables(["A=1", "B=x=y", "C=", "A=2"]) == {"A": "2", "B": "x=y", "C": ""}
    for text in ("A", "=1", "", "A B=1", "1A=2", "-A=1"):
        with pytest.raises(PreflightError, match=re.escape(f"--env {text!r} is not NAME=VALUE")):
            parse_variables(["GOOD=1", text])
    with pytest.raises(PreflightError, match=re.escape("--env 'MY-TOKEN=***' is not NAME=VALUE")):
        parse_variables(["MY-TOKEN=hunter2"])


# --- resources ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("{}", []),
        ('{"CPU": 8, "GPU": 2}', ["--num-cpus=8", "--num-gpus=2"]),
        ('{"CPU": 0}', ["--num-cpus=0"]),
        ('{"memory": 68719476737}', ["--memory=68719476737"]),
        ('{"CPU": 12345678}', ["--num-cpus=12345678"]),
        (
            '{"NPU": 8, "CPU": 4, "fast_disk": 0.5}',
            ["--num-cpus=4", '--resources={"NPU": 8.0, "fast_disk": 0.5}'],
        ),
    ],
)
def test_resource_arguments(text: str, arguments: list[str]) -> None:
    assert resource_arguments(parse_resources(text)) == arguments


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "[1]",
        '{"GPU": "two"}',
        '{"GPU": null}',
        '{"GPU": true}',
        "{GPU: 2}",
        '{"GPU": 1e999}',
    ],
)
def test_parse_resources_not_an_object(text: str) -> None:
    with pytest.raises(PreflightError) as caught:
        parse_resources(text)
    for fact in (repr(text), "not a JSON object of numbers", "'{\"NPU\": 8}'"):
        assert fact in str(caught.value)


def test_parse_resources_of_wrong_amounts() -> None:
    with pytest.raises(PreflightError, match="negative amount of GPU, disk"):
        parse_resources('{"CPU": 1, "GPU": -1, "disk": -0.5}')
    error = "has 7.5 CPU, 0.5 GPU, expected whole numbers; round them down"
    with pytest.raises(PreflightError, match=re.escape(error)):
        parse_resources('{"CPU": 7.5, "GPU": 0.5, "disk": 0.5}')


# --- the object store -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "shm_free", "expected"),
    [
        (100 * GIB, 100 * GIB, 30 * GIB),
        (100 * GIB, 10 * GIB, int(9.5 * GIB)),
        (2000 * GIB, 2000 * GIB, 200 * GIB),
        (LEAST, GIB, STORE_LEAST),
        (LEAST + (20 << 20), GIB, STORE_LEAST + (20 << 20)),
    ],
    ids=[
        "a share of the memory",
        "limited by /dev/shm",
        "limited to 200 GiB",
        "least that Ray accepts",
        "memory beside the store",
    ],
)
def test_object_store_bytes_by_default(available: int, shm_free: int, expected: int) -> None:
    assert object_store_bytes(None, available, shm_free) == expected
    assert object_store_bytes(9.5, 10 * GIB, 10 * GIB) == int(9.5 * GIB), (
        "a requested size may exceed the default share"
    )


@pytest.mark.parametrize(
    ("requested", "available", "shm_free", "facts"),
    [
        *(
            (
                requested,
                100 * GIB,
                10 * GIB,
                (
                    f"--object-store {requested:g} GiB",
                    "10.0 GiB free",
                    "needs 80.0 MiB",
                    "Ask for less",
                ),
            )
            for requested in (9.6, 0.01, 0.0, -1.0, float("nan"), float("inf"))
        ),
        (2.0, 2 * GIB, 9 * GIB, ("2 GiB: /dev/shm has 9.0 GiB free, and 2.0 GiB of memory",)),
        (None, 100 * GIB, 64 << 20, ("64.0 MiB free", "needs 80.0 MiB", "--shm-size", "emptyDir")),
        (
            None,
            LEAST - 1,
            10 * GIB,
            (
                "530.0 MiB of memory are available, expected 530.0 MiB",
                "End other programs",
                "doctor",
            ),
        ),
    ],
)
def test_object_store_bytes_refuses(
    requested: float | None, available: int, shm_free: int, facts: tuple[str, ...]
) -> None:
    with pytest.raises(PreflightError) as caught:
        object_store_bytes(requested, available, shm_free)
    for fact in facts:
        assert fact in str(caught.value)


# --- CPUs -----------------------------------------------------------------------------------------


def test_cpus_allowed_by_slurm() -> None:
    here = cpus_allowed({})
    assert 0 < here <= len(os.sched_getaffinity(0))
    assert cpus_allowed({"SLURM_CPUS_ON_NODE": "1"}) == min(1.0, here)
    assert cpus_allowed({"SLURM_CPUS_ON_NODE": "100000"}) == here, (
        "a step may have fewer CPUs than its job"
    )
    for text in ("", "many", "-1", "2(x3)"):
        assert cpus_allowed({"SLURM_CPUS_ON_NODE": text}) == here


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_MEM_PER_NODE": "200"}, 200 << 20),
        ({"SLURM_MEM_PER_CPU": "50", "SLURM_CPUS_ON_NODE": "3"}, 150 << 20),
        ({"SLURM_MEM_PER_NODE": "0"}, None),  # all memory of the node
        ({"SLURM_MEM_PER_NODE": "900000000"}, None),
        ({"SLURM_MEM_PER_NODE": "4G"}, None),
        ({"SLURM_MEM_PER_CPU": "50"}, None),
    ],
)
def test_memory_by_slurm(variables: dict[str, str], expected: int | None) -> None:
    here = memory_allowed({})
    assert here > 200 << 20
    assert memory_allowed(variables) == (expected or here)
    assert 0 < memory_available(variables) <= memory_allowed(variables)


def _group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{text}\n")


@pytest.mark.parametrize(
    "path", ["/slurm/job_7", "/docker/abc"], ids=["of the host", "hidden from a container"]
)
def test_memory_groups_of_both_versions(tmp_path: Path, path: str) -> None:
    """Cached files do not count as used, and a container does not see the paths of its host."""
    own = tmp_path / "own"
    own.write_text(f"4:memory:{path}\n1:name=systemd:/\n0::{path}\n")
    two, one = tmp_path / "two", tmp_path / "one"
    _group(two, memory_current="700", memory_stat="anon 1", memory_max="max")
    _group(
        two / "slurm" / "job_7",
        memory_current="500",
        memory_stat="inactive_file 30\nactive_file 70",
        memory_max="900",
    )
    _group(
        one / "memory",
        memory_usage_in_bytes="600",
        memory_limit_in_bytes="1000",
        memory_stat="total_inactive_file 50",
    )
    inner = [MemoryGroup(900, 400)] if "slurm" in path else []
    assert memory_groups(str(own), str(two)) == inner
    assert memory_groups(str(own), str(one)) == [MemoryGroup(1000, 550)]
    assert memory_groups(str(tmp_path / "none"), str(tmp_path / "none")) == []
