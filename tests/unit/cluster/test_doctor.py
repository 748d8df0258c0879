"""Tests of ``helmsman doctor``: observations of a node, and their judgement."""

from __future__ import annotations

import json
import os
import resource
import socket
from typing import Any

import msgspec
import pytest

from helmsman._cli import NO, OK, main
from helmsman._cluster.checks import DoctorCheck, diagnose, judge
from helmsman._process.observation import Observed, address_towards, observe, skew_s

NODE = Observed(
    address="10.0.0.1",
    launcher="Slurm: node 0 of 2",
    versions={"helmsman": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"},
    python="3.12.1",
    kernel="Linux 6.8",
    cpus=96,
    cpus_allowed=96.0,
    memory=1 << 40,
    memory_available=1 << 40,
    shm_total=1 << 39,
    shm_free=1 << 39,
    open_files=1 << 20,
    open_files_hard=1 << 20,
    devices=[str(index) for index in range(8)],
    device_kind="cuda",
    temp_dir="/tmp",
    temp_free=1 << 40,
    busy_ports={},
    tried_ports=[6379],
    proxies={},
    no_proxy="",
    segments="reused",
    clock=1000.0,
)


def check(name: str, **changes: Any) -> DoctorCheck:
    (found,) = [
        each
        for each in judge(msgspec.structs.replace(NODE, **changes), num_devices=8)
        if each.name == name
    ]
    return found


def test_judge_healthy_node() -> None:
    assert {each.state for each in judge(NODE, num_devices=8)} == {"ok"}
    assert not any(each.advice for each in judge(NODE))


@pytest.mark.parametrize(
    ("name", "changes", "state", "value", "advice"),
    [
        ("launcher", {"launcher_error": "sources disagree"}, "bad", "Slurm", "sources disagree"),
        ("address", {"address": ""}, "warn", "no route", "give the network"),
        ("address", {"address": "127.0.0.1"}, "warn", "127.0.0.1", "name another"),
        ("ray", {"versions": {"ray": ""}}, "warn", "not installed", "'helmsman-rl[ray]'"),
        ("cpus", {"cpus_allowed": 0.5}, "warn", "0.5 of 96", "raise the limit"),
        ("available memory", {"memory_available": 300 << 20}, "bad", "300.0 MiB", "530.0 MiB"),
        ("/dev/shm", {"shm_free": 64 << 20}, "warn", "64.0 MiB free", "307.2 GiB"),
        ("open files", {"open_files": 1024}, "warn", "1024", "ulimit -n 65536"),
        ("open files", {"open_files_hard": 4096}, "warn", "", "hard limit of 4096"),
        ("accelerators", {"devices": ["0", "1"]}, "bad", "2 cuda (0,1)", "8 are expected"),
        ("accelerators", {"devices": []}, "bad", "none", "8 are expected"),
        ("temp folder", {"temp_free": 1 << 20}, "warn", "/tmp, 1.0 MiB free", "RAY_TMPDIR"),
        ("socket paths", {"temp_dir": "/scratch/" + "x" * 60}, "bad", "bytes", "107"),
        ("ports", {"busy_ports": {6379: "taken"}}, "warn", "6379: taken", "another port"),
        ("proxies", {"proxies": {"https_proxy": "http://p:1"}}, "bad", "http://p:1", "no_proxy"),
        ("shared memory", {"segments": "fresh"}, "warn", "used once", "leases"),
        ("shared memory", {"segments": "none"}, "warn", "none", "Linux"),
    ],
)
def test_judge_names_the_problem(
    name: str, changes: dict[str, Any], state: str, value: str, advice: str
) -> None:
    found = check(name, **changes)
    assert found.state == state
    assert value in found.value
    assert advice in found.advice


def test_judge_proxy_with_exceptions() -> None:
    assert (
        check("proxies", proxies={"http_proxy": "http://p"}, no_proxy="localhost, 10.0.0.1").state
        == "ok"
    )
    assert check("proxies", proxies={"http_proxy": "http://p"}, no_proxy="*").state == "ok"
    assert check("proxies", proxies={"http_proxy": "http://p"}, no_proxy="10.0.0.10").state == "bad"


def test_diagnose_different_nodes() -> None:
    other = msgspec.structs.replace(
        NODE,
        versions={"helmsman": "0.1.0", "ray": "2.59.0"},
        python="3.12.3",
        kernel="Linux 5.15",
    )
    found = diagnose({"a": NODE, "b": NODE, "c": other}, skews_s={"a": 0.0, "b": 0.1, "c": 7.5})
    between = {each.name: each for each in found.between}
    assert {name for name, each in between.items() if each.state == "bad"} == {
        "python",
        "ray",
        "torch",
    }
    assert between["ray"].value == "2.60.0 on most; 2.59.0 on c"
    assert between["torch"].value == "2.13.0 on most; not installed on c"
    assert between["kernel"].state == "warn"
    assert "7.50 s apart, c is furthest ahead" in between["clocks"].value
    assert found.state == "bad"
    report = found.report()
    assert "a: in order" in report
    assert "ray: Install the same version on every node." in report


def test_diagnose_equal_nodes() -> None:
    found = diagnose({"a": NODE, "b": NODE})
    assert found.state == "ok"
    assert found.between == [DoctorCheck("differences", "none")]
    assert skew_s(NODE, 999.5, 1000.5) == 0.0
    assert skew_s(NODE, 998.0, 999.0) == 1.0
    assert skew_s(NODE, 1002.0, 1003.0) == -2.0


def test_observe() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        seen = observe(
            ports=[port], environ={"HTTP_PROXY": "http://p:3128", "JOB_COMPLETION_INDEX": "1"}
        )
    assert seen.busy_ports == {port: "a program listens there"}
    assert seen.proxies == {"HTTP_PROXY": "http://p:3128"}
    assert "--num-nodes" in seen.launcher_error
    assert seen.versions["helmsman"] and seen.versions["torch"]
    assert seen.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert seen.memory > 1 << 28
    assert (
        observe(ports=[port], rank=1, count=2, head="127.0.0.1", environ={}).address == "127.0.0.1"
    )
    slurm = observe(environ={"SLURM_MEM_PER_NODE": "100"})
    assert slurm.memory == 100 << 20
    assert slurm.tried_ports == [6379, 6380]


def test_address_towards() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    for name in ("no such host.invalid", "a..b"):
        assert address_towards(name) == address_towards("")


@pytest.fixture
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("without_proxies")
def test_doctor_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", "--gpus", "64"]) == NO
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    (found,) = (each for each in node["checks"] if each["name"] == "accelerators")
    assert found["state"] == "bad"
    assert "64 are expected" in found["advice"]
    assert {"name": "launcher", "value": "this machine alone", "state": "ok", "advice": ""} in node[
        "checks"
    ]
    for name, value in (("SLURM_NODEID", "1"), ("SLURM_JOB_NUM_NODES", "2"), ("GROUP_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == NO
    assert "sources disagree on the node rank" in capsys.readouterr().out
    code = main(["doctor", "--node-rank", "1", "--head", "127.0.0.1"])
    output = capsys.readouterr().out
    assert code == OK, output
    assert "torchrun in Slurm: node 1 of 2, head 127.0.0.1" in output
