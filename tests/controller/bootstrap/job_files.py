"""Job files read as their launchers read them: what runs on each node, and in which environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from helmsman.controller.cli import _parser

NUM_NODES = 4
"""Of each job file of the page; asked for in a console where there is no file."""
TOKEN = "5ec2e7"
"""What openssl makes."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a job file makes a launcher do."""

    command: list[str]
    """The same on every node."""
    environs: list[dict[str, str]]
    """Of each node, by rank: what the launcher sets."""
    heads: list[str]
    """For each node, the host that is rank 0."""
    gives_token: bool
    num_gpus: int | None = None
    """Of a node; None where the file does not say."""
    kills_after_s: float | None = None
    """How long the launcher waits after a signal; None where the file does not say."""


class Ran(msgspec.Struct, frozen=True):
    """How a script has called the first program of its launcher."""

    argv: list[str]
    environ: dict[str, str]

    @property
    def helmsman(self) -> list[str]:
        """The command that is run on each node."""
        return self.argv[self.argv.index("helmsman") :]


def run(text: str, folder: Path, *arguments: str, program: str = "helmsman", environ: Mapping[str, str] | None = None) -> Ran:
    """Run a shell script, with a program in the place of ``program`` that notes how it is called."""
    binaries, noted = folder / "bin", folder / "noted.json"
    binaries.mkdir()
    note = f"import json, os, sys\njson.dump([sys.argv, dict(os.environ)], open({str(noted)!r}, 'w'))\n"
    (binaries / program).write_text(f"#!{sys.executable}\n{note}")
    (binaries / "openssl").write_text(f"#!/bin/sh\necho {TOKEN}\n")
    for path in binaries.iterdir():
        path.chmod(0o755)
    script = folder / "train.sh"
    script.write_text(text)
    subprocess.run(
        ["bash", script, *arguments],
        cwd=folder,
        env={"PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(folder), **(environ or {})},
        check=True,
        timeout=30,
    )
    argv, seen = json.loads(noted.read_text())
    return Ran([program, *argv[1:]], seen)


def slurm(text: str, folder: Path) -> JobFile:
    """srun starts tasks on the nodes of the allocation; all of them have its environment."""
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    count = int(asked["nodes"])
    environ = {"SLURM_JOB_NUM_NODES": str(count), "SLURM_JOB_NODELIST": f"gpu[07-{count + 6:02}]"}
    ran = run(text, folder, program="srun", environ={**environ, "SLURM_CPUS_PER_TASK": asked["cpus-per-task"]})
    step = dict(option[2:].split("=") for option in ran.argv[1 : ran.argv.index("helmsman")])
    assert step["cpus-per-task"] == asked["cpus-per-task"]
    each = {
        **ran.environ,
        "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_STEP_NODELIST": environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_TASKS_PER_NODE": f"{step['ntasks-per-node']}(x{count})",
    }
    return JobFile(
        command=ran.helmsman,
        environs=[each | {"SLURM_NODEID": str(rank)} for rank in range(count)],
        heads=["gpu07"] * count,
        gives_token=ran.environ["HELMSMAN_TOKEN"] == TOKEN,
        num_gpus=int(asked["gpus-per-node"]),
        kills_after_s=float(asked["signal"].removeprefix("TERM@")),
    )


def pod(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What a pod's specification says of JobFile."""
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    (mounted,) = (volumes[mount["name"]] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    assert mounted["emptyDir"]["medium"] == "Memory"
    return {
        "command": [*container.get("command", []), *container.get("args", [])],
        "gives_token": any(
            each["name"] == "HELMSMAN_TOKEN" and "secretKeyRef" in each["valueFrom"] for each in container.get("env", [])
        ),
        "num_gpus": container["resources"]["limits"].get("nvidia.com/gpu"),
        "kills_after_s": spec.get("terminationGracePeriodSeconds"),
    }


def kubernetes(text: str, folder: Path) -> JobFile:
    """An Indexed Job names its pods by their indices, below the Service of their subdomain."""
    service, job = yaml.safe_load_all(text)
    name, spec = job["metadata"]["name"], job["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    assert service["spec"]["selector"] == {"job-name": name}  # with which Kubernetes labels the pods of a Job
    assert service["spec"]["clusterIP"] == "None"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    ranks = range(spec["completions"])
    return JobFile(
        environs=[{"JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": f"{name}-{rank}"} for rank in ranks],
        heads=[f"{name}-0.{service['metadata']['name']}" for _ in ranks],
        **pod(spec["template"]["spec"]),
    )


def volcano(text: str, folder: Path) -> JobFile:
    """The plug-ins env and svc name the pods and tell each of all."""
    job = yaml.safe_load(text)
    (task,) = job["spec"]["tasks"]
    assert {"env", "svc"} <= set(job["spec"]["plugins"])
    assert job["spec"]["minAvailable"] == task["replicas"]
    name, kind, ranks = job["metadata"]["name"], task["name"].upper(), range(task["replicas"])
    hosts = [f"{name}-{task['name']}-{rank}.{name}" for rank in ranks]
    each = {f"VC_{kind}_NUM": str(len(hosts)), f"VC_{kind}_HOSTS": ",".join(hosts)}
    return JobFile(
        environs=[{**each, "VC_TASK_INDEX": str(rank), "VK_TASK_INDEX": str(rank)} for rank in ranks],
        heads=[hosts[0] for _ in ranks],
        **pod(task["template"]["spec"]),
    )


def beaker(text: str, folder: Path) -> JobFile:
    """Each replica is told of the leader."""
    (task,) = yaml.safe_load(text)["tasks"]
    assert task["leaderSelection"]
    assert task["hostNetworking"]
    each = {"BEAKER_REPLICA_COUNT": str(task["replicas"]), "BEAKER_LEADER_REPLICA_HOSTNAME": "node-12.example"}
    return JobFile(
        command=[*task["command"], *task["arguments"]],
        environs=[each | {"BEAKER_REPLICA_RANK": str(rank)} for rank in range(task["replicas"])],
        heads=["node-12.example"] * task["replicas"],
        gives_token=any(each["name"] == "HELMSMAN_TOKEN" and each["secret"] for each in task["envVars"]),
        num_gpus=task["resources"]["gpuCount"],
    )


def skypilot(text: str, folder: Path) -> JobFile:
    """The script runs on each node, beside a Ray of SkyPilot's own."""
    task = yaml.safe_load(text)
    count = task["num_nodes"]
    # its own Ray, which must not be taken for ours
    ran = run(task["run"], folder, environ={"RAY_ADDRESS": "10.1.0.4:6380"})
    each = {
        **ran.environ,
        "SKYPILOT_NUM_NODES": str(count),
        "SKYPILOT_NODE_IPS": "\n".join(f"10.1.0.{4 + rank}" for rank in range(count)),
    }
    control_port = _parser().parse_args(ran.helmsman[1:]).control_port
    assert control_port not in (None, 6380, 8266), "SkyPilot's own Ray listens there"
    return JobFile(
        command=ran.helmsman,
        environs=[each | {"SKYPILOT_NODE_RANK": str(rank)} for rank in range(count)],
        heads=["10.1.0.4"] * count,
        gives_token="HELMSMAN_TOKEN" in task["secrets"],
        num_gpus=int(task["resources"]["accelerators"].partition(":")[2]),
    )


def torchrun(text: str, folder: Path) -> JobFile:
    """Its child is told of nodes as groups; torchrun's own parser reads the file."""
    from torch.distributed.run import parse_args

    ran = run(text, folder, "0", "gpu07", program="torchrun")
    options = parse_args(ran.argv[1:])
    assert options.no_python
    count, per_node = int(options.nnodes), int(options.nproc_per_node)
    each = {
        "GROUP_WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(per_node),
        "WORLD_SIZE": str(count * per_node),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
    }
    command = [options.training_script, *options.training_script_args]
    return JobFile(
        command=command,
        environs=[each | {"GROUP_RANK": str(rank), "RANK": str(rank * per_node)} for rank in range(count)],
        heads=["gpu07"] * count,
        gives_token="--token-file" in command,
        kills_after_s=30.0,
    )


def pai(text: str, folder: Path) -> JobFile:
    """The command runs on the master and on each worker."""
    ran = run(text, folder)
    each = {"WORLD_SIZE": str(NUM_NODES), "MASTER_ADDR": "dlc-master-0", "MASTER_PORT": "23456"}
    return JobFile(
        command=ran.helmsman,
        environs=[each | {"RANK": str(rank)} for rank in range(NUM_NODES)],
        heads=["dlc-master-0"] * NUM_NODES,
        gives_token=True,  # in its console, not in a file
    )


def dstack(text: str, folder: Path) -> JobFile:
    """The commands run on each node, in one shell."""
    task = yaml.safe_load(text)
    ran = run(" && ".join(task["commands"]), folder)
    each = {"DSTACK_NODES_NUM": str(task["nodes"]), "DSTACK_MASTER_NODE_IP": "10.2.0.1"}
    return JobFile(
        command=ran.helmsman,
        environs=[each | {"DSTACK_NODE_RANK": str(rank)} for rank in range(task["nodes"])],
        heads=["10.2.0.1"] * task["nodes"],
        gives_token=any(re.fullmatch(r"HELMSMAN_TOKEN=\$\{\{ secrets\.\w+ \}\}", each) for each in task["env"]),
        num_gpus=int(task["resources"]["gpu"].partition(":")[2]),
    )


def open_mpi(text: str, folder: Path) -> JobFile:
    """mpirun starts a process on each host."""
    (folder / "hosts.txt").write_text("gpu07 slots=8\ngpu08 slots=8\n")
    ran = run(text, folder, program="mpirun")
    options = ran.argv[1 : ran.argv.index("helmsman")]
    assert options[options.index("--map-by") + 1] == "ppr:1:node"
    assert options[options.index("-x") + 1] == "HELMSMAN_TOKEN"
    count = int(options[options.index("-np") + 1])
    each = {"OMPI_COMM_WORLD_SIZE": str(count), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    return JobFile(
        command=ran.helmsman,
        environs=[each | {"OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(count)],
        heads=["gpu07"] * count,
        gives_token=ran.environ["HELMSMAN_TOKEN"] == TOKEN,
    )
