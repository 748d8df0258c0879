"""The job files of docs/launchers.md are what the page says, down to each node's rank and head."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from helmsman.api.errors import BootstrapExit
from helmsman.controller._node.checks import HEAD_PORTS
from helmsman.controller._node.launchers import identify_node
from helmsman.controller.cli import _parser
from tests.controller.bootstrap import job_files
from tests.controller.bootstrap.job_files import NUM_NODES, JobFile

PAGE = (Path(__file__).parents[3] / "docs" / "launchers.md").read_text()
NUM_GPUS = 8
AFTER_GRACE_S = 10.0
"""What the page says that a launcher is to wait longer than --grace."""


def _blocks() -> dict[str, tuple[str, str]]:
    """Heading -> language and text of its job file; a section has one at most."""
    found = {}
    for heading, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE):
        fenced = re.findall(r"^```(\w+)\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)
        assert len(fenced) <= 1, heading
        if fenced:
            found[heading] = fenced[0]
    return found


BLOCKS = _blocks()

LAUNCHERS: dict[str, tuple[str, Callable[[str, Path], JobFile]]] = {
    "Slurm": ("Slurm", job_files.slurm),
    "Kubernetes: Indexed Job": ("a Kubernetes Indexed Job", job_files.kubernetes),
    "Beaker": ("Beaker", job_files.beaker),
    "SkyPilot": ("SkyPilot", job_files.skypilot),
    "torchrun": ("torchrun", job_files.torchrun),
    "Volcano": ("Volcano", job_files.volcano),
    "PAI-DLC": ("RANK and WORLD_SIZE (PAI-DLC)", job_files.pai),
    "dstack": ("dstack", job_files.dstack),
    "Open MPI": ("Open MPI", job_files.open_mpi),
}
"""Heading -> what identify_node calls the launcher, and how that reads its file."""


def _program(options: argparse.Namespace) -> list[str]:
    return [each for each in options.program if each != "--"]  # which argparse keeps, or not, as Python's version has it


@pytest.mark.parametrize("heading", LAUNCHERS)
def test_every_node_knows_its_place(heading: str, tmp_path: Path) -> None:
    launcher, read = LAUNCHERS[heading]
    job = read(BLOCKS[heading][1], tmp_path)
    options = _parser().parse_args(job.command[1:])
    assert _program(options) == ["python", "train.py"]
    assert (options.gpus, job.num_gpus or options.gpus) == (NUM_GPUS, NUM_GPUS)
    assert job.gives_token
    assert job.kills_after_s is None or job.kills_after_s >= options.grace + AFTER_GRACE_S
    (row,) = re.findall(rf"^\| {re.escape(launcher)} \| (.*) \|$", PAGE, re.MULTILINE)
    cells = dict(zip(("rank", "count", "head"), row.replace("<TASK>", "WORKER").split(" | "), strict=True))
    assert len(job.environs) == NUM_NODES
    for rank, environ in enumerate(job.environs):
        found = identify_node(environ, rank=options.node_rank, count=options.num_nodes, head=options.head)
        assert (found.launcher, found.rank, found.count, found.head) == (launcher, rank, NUM_NODES, job.heads[rank])
        for field, said in found.said_by.items():
            (name,) = re.findall(r"^(?:first of )?(--[a-z-]+|[A-Z_]+)", said)
            assert f"`{name}`" in cells[field], f"the page has {cells[field]} for the {field}, which is from {said}"


def test_kuberay_is_attached_to() -> None:
    job = yaml.safe_load(BLOCKS["KubeRay"][1])["spec"]
    options = _parser().parse_args(shlex.split(job["entrypoint"])[1:])
    assert _program(options) == ["python", "train.py"]
    found = identify_node({"RAY_ADDRESS": "10.0.0.1:6379"}, rank=options.node_rank, count=options.num_nodes, head=options.head)
    assert found.attach_to == "10.0.0.1:6379"
    cluster = job["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert (group["replicas"], job_files.pod(group["template"]["spec"])["num_gpus"]) == (NUM_NODES, NUM_GPUS)
    assert job_files.pod(cluster["headGroupSpec"]["template"]["spec"])["num_gpus"] is None
    assert f"RayScheduler(num_nodes={NUM_NODES + 1})" in PAGE


def test_flags_alone(tmp_path: Path) -> None:
    for rank in range(NUM_NODES):
        (folder := tmp_path / str(rank)).mkdir()
        ran = job_files.run(BLOCKS["Anything else"][1], folder, str(rank), "gpu07")
        options = _parser().parse_args(ran.helmsman[1:])
        assert _program(options) == ["python", "train.py"]
        assert options.token_file == f"{folder}/train.token"
        found = identify_node({}, rank=options.node_rank, count=options.num_nodes, head=options.head)
        assert (found.rank, found.count, found.head) == (rank, NUM_NODES, "gpu07")


def test_no_job_file_is_left_out() -> None:
    assert set(BLOCKS) == {*LAUNCHERS, "KubeRay", "Anything else"}
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors


@pytest.mark.parametrize("heading", [heading for heading, (language, _) in BLOCKS.items() if language == "bash"])
def test_scripts_are_shell(heading: str) -> None:
    subprocess.run(["bash", "-n"], input=BLOCKS[heading][1], text=True, check=True, timeout=30)


def test_exit_codes_and_defaults_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| (9\d) \| [\w ]+ \| `(\w+)`", PAGE, re.MULTILINE))
    assert rows == {str(code.value): code.name for code in BootstrapExit}
    options = _parser().parse_args(["up", "--", "true"])
    assert f"waits `--timeout` seconds ({options.timeout:g})" in PAGE
    assert f"has `--grace` seconds ({options.grace:g})" in PAGE
    assert re.search(rf"^\| {HEAD_PORTS[0]}, `--port` \|", PAGE, re.MULTILINE)
    assert re.search(rf"^\| {HEAD_PORTS[1]}, `--control-port`: `--port` \+ 1 \|", PAGE, re.MULTILINE)
