"""Test that the job files of docs/launchers.md start nodes with the ranks that the page states."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from helmsman._cli import _parser
from helmsman._process.launchers import identify_node
from helmsman._process.observation import HEAD_PORTS
from helmsman.api.errors import BootstrapExit

PAGE = (Path(__file__).parents[3] / "docs" / "launchers.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
BLOCKS: dict[str, tuple[str, str]] = {
    heading: found[0]
    for heading, body in SECTIONS.items()
    if (found := re.findall(r"^```(\w+)\n(.*?)^```$", body, re.DOTALL | re.MULTILINE))
}
"""Heading -> language and text of its job file; a section has at most one."""
NUM_NODES, NUM_GPUS = 4, 8
AFTER_GRACE_S = 10.0
"""Seconds that a launcher waits beyond --grace, as the page states."""
TOKEN = "5ec2e7"


class Launcher(NamedTuple):
    """Properties of a launcher and of its job file."""

    name: str
    """Name that identify_node reports."""
    head: str
    variables: str
    """Variables that it sets on a node; RANK stands for the node's rank."""
    program: str = "helmsman"
    """First program that its shell script calls: the launcher, if that starts the nodes."""
    arguments: tuple[str, ...] = ()
    """Arguments of its shell script."""


LAUNCHERS = {
    "Slurm": Launcher(
        "Slurm",
        "gpu07",
        "SLURM_NODEID=RANK; SLURM_JOB_NUM_NODES=4; SLURM_STEP_NUM_NODES=4; "
        "SLURM_JOB_NODELIST=gpu[07-10]; "
        "SLURM_STEP_NODELIST=gpu[07-10]; SLURM_STEP_TASKS_PER_NODE=1(x4)",
        "srun",
    ),
    "Kubernetes: Indexed Job": Launcher(
        "a Kubernetes Indexed Job",
        "train-0.train",
        "JOB_COMPLETION_INDEX=RANK; HOSTNAME=train-RANK",
    ),
    "Beaker": Launcher(
        "Beaker",
        "node-12.example",
        "BEAKER_REPLICA_RANK=RANK; BEAKER_REPLICA_COUNT=4; "
        "BEAKER_LEADER_REPLICA_HOSTNAME=node-12.example",
    ),
    "SkyPilot": Launcher(
        "SkyPilot",
        "10.1.0.4",
        "SKYPILOT_NODE_RANK=RANK; SKYPILOT_NUM_NODES=4; "
        "SKYPILOT_NODE_IPS=10.1.0.4\n10.1.0.5\n10.1.0.6\n10.1.0.7",
    ),
    "torchrun": Launcher(
        "torchrun",
        "gpu07",
        "GROUP_RANK=RANK; RANK=RANK; GROUP_WORLD_SIZE=4; WORLD_SIZE=4; LOCAL_WORLD_SIZE=1; "
        "MASTER_ADDR=gpu07",
        "torchrun",
        ("0", "gpu07"),
    ),
    "Volcano": Launcher(
        "Volcano",
        "train-worker-0.train",
        "VC_TASK_INDEX=RANK; VC_WORKER_NUM=4; "
        "VC_WORKER_HOSTS=train-worker-0.train,train-worker-1.train",
    ),
    "PAI-DLC": Launcher(
        "RANK and WORLD_SIZE (PAI-DLC)",
        "dlc-master-0",
        "RANK=RANK; WORLD_SIZE=4; MASTER_ADDR=dlc-master-0",
    ),
    "dstack": Launcher(
        "dstack",
        "10.2.0.1",
        "DSTACK_NODE_RANK=RANK; DSTACK_NODES_NUM=4; DSTACK_MASTER_NODE_IP=10.2.0.1",
    ),
    "Open MPI": Launcher(
        "Open MPI",
        "gpu07",
        "OMPI_COMM_WORLD_RANK=RANK; OMPI_COMM_WORLD_SIZE=4; OMPI_COMM_WORLD_LOCAL_SIZE=1",
        "mpirun",
    ),
}


def run_shell(
    text: str, folder: Path, program: str, *arguments: str
) -> tuple[list[str], dict[str, str]]:
    """Run a shell script; return the command line and environment of its call of ``program``."""
    binaries, call = folder / "bin", folder / "call.json"
    binaries.mkdir()
    record = (
        f"import json, os, sys\njson.dump([sys.argv, dict(os.environ)], open({str(call)!r}, 'w'))\n"
    )
    (binaries / program).write_text(f"#!{sys.executable}\n{record}")
    (binaries / "openssl").write_text(f"#!/bin/sh\necho {TOKEN}\n")
    for path in binaries.iterdir():
        path.chmod(0o755)
    (folder / "hosts.txt").write_text("gpu07 slots=8\ngpu08 slots=8\n")
    (folder / "train.sh").write_text(text)
    environ = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SLURM_CPUS_PER_TASK": "96",
    }
    # the launcher has a Ray of its own
    environ["RAY_ADDRESS"] = "10.1.0.4:6380" if "RAY_ADDRESS" in text else ""
    subprocess.run(
        ["bash", "train.sh", *arguments], cwd=folder, env=environ, check=True, timeout=30
    )
    (_, *argv), seen = json.loads(call.read_text())
    return [program, *argv], seen


def maps_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all mappings in a YAML document."""
    if isinstance(value, dict):
        yield value
    for each in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from maps_in(each)


def command_of(heading: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of each node, after that of the launcher, and its environment."""
    language, text = BLOCKS[heading]
    launcher = LAUNCHERS[heading]
    if language == "yaml":
        maps = [each for document in yaml.safe_load_all(text) for each in maps_in(document)]
        (container,) = (each for each in maps if {"command", "commands", "run"} & each.keys())
        if isinstance(container.get("command"), list):
            return [
                *container["command"],
                *container.get("args", container.get("arguments", [])),
            ], {}
        text = container["run"] if "run" in container else "\n".join(container["commands"])
    return run_shell(text, folder, launcher.program, *launcher.arguments)


def parsed(command: list[str]) -> argparse.Namespace:
    """Parse the options of ``helmsman up``, and check its program."""
    options = _parser().parse_args(command[command.index("helmsman") + 1 :])
    assert [each for each in options.program if each != "--"] == ["python", "train.py"]
    return options


@pytest.mark.parametrize("heading", LAUNCHERS)
def test_job_file(heading: str, tmp_path: Path) -> None:
    launcher, text = LAUNCHERS[heading], BLOCKS[heading][1]
    command, inherited = command_of(heading, tmp_path)
    options = parsed(command)
    assert options.gpus == NUM_GPUS
    assert "HELMSMAN_TOKEN" in SECTIONS[heading] or options.token_file
    if launcher.program in ("srun", "mpirun"):
        assert inherited["HELMSMAN_TOKEN"] == TOKEN
    for wait_s in re.findall(r"terminationGracePeriodSeconds: (\d+)|TERM@(\d+)", text):
        assert float(max(wait_s)) >= options.grace + AFTER_GRACE_S
    (row,) = re.findall(rf"^\| {re.escape(launcher.name)} \| (.*) \|$", PAGE, re.MULTILINE)
    cells = dict(
        zip(("rank", "count", "head"), row.replace("<TASK>", "WORKER").split(" | "), strict=True)
    )
    for rank in range(NUM_NODES):
        own = dict(each.split("=") for each in launcher.variables.split("; "))
        own |= {name: value.replace("RANK", str(rank)) for name, value in own.items()}
        environ = {name: value for name, value in inherited.items() if value} | own
        found = identify_node(
            environ, rank=options.node_rank, count=options.num_nodes, head=options.head
        )
        assert (found.launcher, found.rank, found.count, found.head) == (
            launcher.name,
            rank,
            NUM_NODES,
            launcher.head,
        )
        for field, source in found.said_by.items():
            (name,) = re.findall(r"^(?:first of )?(--[a-z-]+|[A-Z_]+)", source)
            assert f"`{name}`" in cells[field], (
                f"the page names {cells[field]} as source of the {field}, which is {source}"
            )


REQUESTS = {
    "Slurm": "--nodes=4; --gpus-per-node=8; --ntasks-per-node=1",
    "Kubernetes: Indexed Job": "completionMode: Indexed; completions: 4; parallelism: 4; "
    "nvidia.com/gpu: 8; medium: Memory; clusterIP: None; job-name: train; subdomain: train; "
    "secretKeyRef: {name: train, key: token}",
    "Beaker": "replicas: 4; gpuCount: 8; leaderSelection: true; hostNetworking: true; secret: ",
    # the Ray of SkyPilot listens on 6380
    "SkyPilot": "num_nodes: 4; H100:8; --control-port 6381",
    "torchrun": "--nnodes=4; --nproc-per-node=1; --no-python; --token-file",
    "Volcano": "minAvailable: 4; replicas: 4; nvidia.com/gpu: 8; env: []; svc: [; "
    "medium: Memory; secretKeyRef",
    "dstack": "nodes: 4; gpu: H100:8; HELMSMAN_TOKEN=${{ secrets.train_token }}",
    "Open MPI": "-np 4; --map-by ppr:1:node; -x HELMSMAN_TOKEN",
}


@pytest.mark.parametrize("heading", REQUESTS)
def test_job_file_requests_nodes(heading: str) -> None:
    text = BLOCKS[heading][1]
    assert [each for each in REQUESTS[heading].split("; ") if each not in text] == []


def test_job_file_of_kuberay() -> None:
    job = yaml.safe_load(BLOCKS["KubeRay"][1])["spec"]
    options = parsed(shlex.split(job["entrypoint"]))
    found = identify_node(
        {"RAY_ADDRESS": "10.0.0.1:6379"},
        rank=options.node_rank,
        count=options.num_nodes,
        head=options.head,
    )
    assert found.attach_to == "10.0.0.1:6379"
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert (group["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (
        NUM_NODES,
        NUM_GPUS,
    )
    assert f"RayScheduler(num_nodes={NUM_NODES + 1})" in PAGE


def test_job_file_with_flags_only(tmp_path: Path) -> None:
    for rank in (0, NUM_NODES - 1):
        (folder := tmp_path / str(rank)).mkdir()
        options = parsed(
            run_shell(BLOCKS["Anything else"][1], folder, "helmsman", str(rank), "gpu07")[0]
        )
        assert options.token_file == f"{folder}/train.token"
        found = identify_node(
            {}, rank=options.node_rank, count=options.num_nodes, head=options.head
        )
        assert (found.rank, found.count, found.head) == (rank, NUM_NODES, "gpu07")


def test_page_sections_and_anchors() -> None:
    assert set(BLOCKS) == {*LAUNCHERS, "KubeRay", "Anything else"}
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors


def test_page_exit_codes_and_defaults() -> None:
    rows = dict(re.findall(r"^\| (9\d) \| [\w ]+ \| `(\w+)`", PAGE, re.MULTILINE))
    assert rows == {str(code.value): code.name for code in BootstrapExit}
    options = _parser().parse_args(["up", "--", "true"])
    assert f"waits `--timeout` seconds ({options.timeout:g})" in PAGE
    assert f"has `--grace` seconds ({options.grace:g})" in PAGE
    assert re.search(rf"^\| {HEAD_PORTS[0]}, `--port` \|", PAGE, re.MULTILINE)
    assert re.search(
        rf"^\| {HEAD_PORTS[1]}, `--control-port`: `--port` \+ 1 \|", PAGE, re.MULTILINE
    )
